"""Block diffusion: a request whose tokens are filled in, block by block, over passes of the model.

For the scheduler a pass is a prefill: all tokens so far, then the block, masked where it is not filled yet. What was
computed in its final form stays in the cache, whose prefix tree takes no masked block. After a pass the likeliest
tokens stay, the others are masked again; a full block is computed in its final form by the pass that begins the next
one, or by a last pass at the end. So the cache, and the route pool with it, hold each token as its final pass left it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tracklayer.errors import UserError
from tracklayer.types import EngineRequest, FinishReason, TokenLogprobs


@dataclass(slots=True)
class BlockRun:
    """How far one request is.

    length, mask_id: of a block, and what stands for a token that is not filled in yet.
    tokens: prompt and output, with the block that is being filled, masked in part, at the end.
    begin: position of that block's first token; every position before it is in its final form in a pass.
    limit: position after the last token that the request may have.
    logprobs: by position, of the tokens that were filled in. ending: why it ends, while its last pass runs.
    found: what the pass that came back last has sampled for the masked positions. form: what all passes ask for.
    """

    request: EngineRequest
    length: int
    mask_id: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    begin: int = 0
    logprobs: dict[int, float] = field(default_factory=dict)
    ending: FinishReason | None = None
    found: TokenLogprobs | None = None
    form: EngineRequest = field(init=False)

    def __post_init__(self) -> None:
        self.form = replace(
            self.request,
            sampling=replace(self.request.sampling, max_new_tokens=0),
            return_logprob=False,
            stop_token_ids=frozenset(),  # looked for in finished blocks, not in a pass
        )
        self.tokens = list(self.request.input_ids)
        self.begin = len(self.tokens) // self.length * self.length
        self._mask()

    def _mask(self) -> None:
        self.tokens += [self.mask_id] * (self.begin + self.length - len(self.tokens))

    @property
    def masked(self) -> list[int]:
        """Positions that are still masked."""
        return [p for p in range(self.begin, len(self.tokens)) if self.tokens[p] == self.mask_id]

    def next_pass(self) -> EngineRequest:
        """The request for the scheduler. The last pass is over final tokens only."""
        return replace(self.form, input_ids=list(self.tokens), masked_from=None if self.ending else self.begin)

    def fill(self, found: TokenLogprobs, confidence: float) -> None:
        """Keep the tokens that are more probable than that, and always the likeliest one."""
        positions = self.masked
        assert len(positions) == len(found.token_ids), f"{len(found.token_ids)} tokens for {len(positions)} masks"
        likely = np.exp(found.logprobs) > confidence
        likely[int(np.argmax(found.logprobs))] = True
        for at in np.flatnonzero(likely):
            self.tokens[positions[at]] = int(found.token_ids[at])
            self.logprobs[positions[at]] = float(found.logprobs[at])

    def filled(self) -> list[tuple[int, TokenLogprobs]]:
        """The block's new tokens, up to the limit, each with the log-probability that it had when it was filled in."""
        first = max(self.begin, len(self.request.input_ids))
        return [
            (
                self.tokens[p],
                TokenLogprobs(np.array([self.tokens[p]], np.int32), np.array([self.logprobs[p]], np.float32)),
            )
            for p in range(first, min(len(self.tokens), self.limit))
        ]

    def advance(self) -> None:
        """Begin the next block."""
        self.begin += self.length
        self._mask()

    def end(self, num_output: int, reason: FinishReason) -> None:
        """Go back to the block in which the last of `num_output` tokens lies; one last pass computes it."""
        stop = len(self.request.input_ids) + num_output
        del self.tokens[-(-stop // self.length) * self.length :]
        self.begin, self.ending = len(self.tokens), reason


def check(request: EngineRequest, length: int, mask_id: int, longest: int) -> None:
    """Raises UserError for what a model that fills blocks has no meaning for, and for what does not fit."""
    sampling, prompt = request.sampling, len(request.input_ids)
    refused = {
        "log-probabilities of the prompt": request.return_logprob and 0 <= request.logprob_start_len < prompt,
        "top_logprobs_num": request.top_logprobs_num > 0,
        "token_ids_logprob": bool(request.token_ids_logprob),
        "penalties": sampling.penalised,
        "min_new_tokens": sampling.min_new_tokens > 0,
        "structured output": sampling.constrained,
    }
    for name, asked in refused.items():
        if asked:
            raise UserError(f"{name} can not be had from a model that fills in blocks of {length} tokens")
    if mask_id in request.input_ids:
        raise UserError(f"the prompt holds {mask_id}, the id that stands for a token that is not filled in yet")
    most = room(longest, length)
    wanted = sampling.max_new_tokens
    if prompt + (wanted or 0) > most or prompt >= most:
        raise UserError(
            f"the prompt's {prompt} tokens and max_new_tokens {wanted} do not fit into {most // length} blocks of "
            f"{length} tokens; shorten one of them"
        )


def start(request: EngineRequest, length: int, mask_id: int, longest: int) -> BlockRun:
    """A run of a request that passed `check`."""
    wanted = request.sampling.max_new_tokens
    limit = room(longest, length) if wanted is None else len(request.input_ids) + wanted
    run = BlockRun(request, length, mask_id, limit)
    if wanted == 0:
        run.tokens = list(request.input_ids)
        run.begin, run.ending = len(run.tokens), FinishReason("length", length=0)
    return run


def room(longest: int, length: int) -> int:
    """Tokens in whole blocks, of `longest` that a request may have with the room of a last token."""
    return (longest - 1) // length * length
