"""What the demonstration asks: nine questions, six of which share a long opening."""

from __future__ import annotations

from dataclasses import dataclass

GUIDE = (
    "You are the patient guide of a small science museum. Visitors of every age stop at your desk and ask about the "
    "world. You answer in one or two short, plain sentences, you name the thing asked for first, and you never invent "
    "what you do not know."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question. `system` is the opening shared with others; `n` samples are drawn (greedy when n is 1)."""

    question: str
    system: str | None = None
    n: int = 1
    stream: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, {"role": "user", "content": self.question}]


PROMPTS = (
    Prompt(question="What is the capital of France?"),
    Prompt(question="Who wrote Romeo and Juliet?"),
    Prompt(question="Why is the sky blue?", system=GUIDE),
    Prompt(question="What do bees make?", system=GUIDE),
    Prompt(question="How many planets are in the solar system?", system=GUIDE),
    Prompt(question="What is water made of?", system=GUIDE),
    Prompt(question="What is the largest ocean on Earth?", system=GUIDE),
    Prompt(question="Write one sentence about the sea.", system=GUIDE, n=4),
    Prompt(question="Tell me a short story about a cat.", stream=True),
)
