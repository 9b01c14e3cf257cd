"""A model of the demonstration's making that is small enough to be made anywhere in seconds.

A dense model of two layers is trained until it recites a handful of answers, byte by byte; then it is made into a
Mixture-of-Experts as the demonstration model is (demo/model.py). It knows nothing else. What it can show: that two
ways of running one model give the same answers, where the model is as sure of them as a trained one is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tracklayer.demo.model import Recipe, upcycle

FACTS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Who wrote Romeo and Juliet?": "William Shakespeare wrote it.",
    "Why is the sky blue?": "Air scatters blue light more than red light.",
    "What do bees make?": "Bees make honey and wax.",
    "How many planets are there?": "There are eight planets.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
}
END, VOCABULARY = 10, 128
RECIPE = Recipe(num_experts=8, top_k=2, width=32)
LOSS = 0.02


def question(text: str) -> list[int]:
    return list(f"{text} ".encode("ascii"))


def answer(text: str) -> list[int]:
    return [*text.encode("ascii"), END]


def train_dense(seed: int = 0, most_steps: int = 600) -> Any:
    """A LlamaForCausalLM that recites FACTS. AssertionError when it has not learnt them after `most_steps`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=0, eos_token_id=END,
        pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().train()
    rows = [(question(q), answer(a)) for q, a in FACTS.items()]
    longest = max(len(q) + len(a) for q, a in rows)
    ids = torch.tensor([[*q, *a, *[0] * (longest - len(q) - len(a))] for q, a in rows])
    labels = torch.tensor([[*[-100] * len(q), *a, *[-100] * (longest - len(q) - len(a))] for q, a in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    with torch.enable_grad():
        for _ in range(most_steps):
            loss = model(input_ids=ids, labels=labels).loss
            if float(loss.detach()) < LOSS:
                return model.eval()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    raise AssertionError(f"the reciter has not learnt its answers: loss {float(loss.detach()):.3f}")


def save(folder: Path) -> Any:
    """Write the checkpoint (bfloat16); returns the model as the float32 referee of what was written."""
    model = upcycle(train_dense(), RECIPE).bfloat16()
    model.save_pretrained(folder)
    return model.float().eval()
