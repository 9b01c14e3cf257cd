"""CUDA graphs of small steps with prompts in them, where launching kernel by kernel would take longer than running.

D lines for sequences that decode, then T prompt tokens of at most P sequences, all padded: decode lines past the
step's own compute a scratch token (row R, slot 0: page 0 of KV and pool), prompt tokens past it belong to no sequence
and wake no expert. The graph ends with the final hidden states; which of them are sampled differs from step to step.
Passes over blocks (block diffusion) are prompts too: D = 0, T in whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tracklayer.layers.batch import Batch
from tracklayer.models.decoder import Decoder
from tracklayer.runner.batch import ALIGN, upload
from tracklayer.runner.graphs import Captured, capture_each
from tracklayer.runner.kv_cache import Caches
from tracklayer.runner.rows import Rows, table_arrays
from tracklayer.types import Share, StepPlan

PROMPT_TOKENS = (64, 256, 1024)  # steps of this many are bound by launches when run eagerly
MAX_PROMPTS = 64


class Size(NamedTuple):
    """What a graph holds at most: lines that decode, prompt tokens, and prompts that they belong to."""

    decodes: int
    tokens: int
    prompts: int


def ladder(max_rows: int, largest: int) -> list[Size]:
    """Sizes to capture for steps of up to `largest` prompt tokens."""
    decodes = sorted({0, *(min(d, max_rows) for d in (16, 64, 256))})
    return [Size(d, t, MAX_PROMPTS) for d in decodes for t in PROMPT_TOKENS if t <= largest]


def block_ladder(max_rows: int, largest: int, length: int) -> list[Size]:
    """The same for passes over blocks of `length` tokens, of which a row has two at most: finished, being filled."""
    most = min(2 * max_rows, min(largest, PROMPT_TOKENS[-1]) // length)
    counts = {n for k in range(most.bit_length()) for n in (1 << k, 3 << k)} | {most}
    return [Size(0, n * length, min(n, max_rows)) for n in sorted(counts) if 0 < n <= most]


@dataclass(slots=True)
class MixedBuffers:
    """Static inputs of one graph, views of one tensor: what `Batch` calls them, and the number of real tokens."""

    packed: Tensor
    fields: dict[str, Tensor]

    @classmethod
    def allocate(cls, size: Size, device: torch.device) -> MixedBuffers:
        tokens, sequences = size.decodes + size.tokens, size.decodes + size.prompts
        lengths = {
            "token_ids": tokens,
            "positions": tokens,
            "slots": tokens,
            "window_slots": tokens,
            "rows": sequences,
            "lens": sequences,
            "starts": sequences + 1,
            "num_tokens": 1,
        }
        offsets = np.cumsum([0, *(-(-n // ALIGN) * ALIGN for n in lengths.values())])
        packed = torch.zeros(int(offsets[-1]), dtype=torch.int32, device=device)
        fields = {name: packed[at : at + n] for (name, n), at in zip(lengths.items(), offsets, strict=False)}
        return cls(packed, fields)

    def load(self, plan: StepPlan, size: Size, scratch: int) -> None:
        """Copy a step in, padded to `size`; one copy to the device, no waiting."""
        host = torch.zeros(self.packed.shape, dtype=torch.int32)
        base = self.packed.storage_offset()
        at = {name: host[f.storage_offset() - base :][: len(f)].numpy() for name, f in self.fields.items()}
        num_decodes = plan.num_decodes
        decodes, prompts = plan.shares[:num_decodes], plan.shares[num_decodes:]
        padded = size.decodes
        at["rows"][:] = scratch
        at["lens"][:padded] = 1
        at["rows"][:num_decodes] = [s.row for s in decodes]
        at["lens"][:num_decodes] = [s.start + 1 for s in decodes]
        at["positions"][:num_decodes] = [s.start for s in decodes]
        at["slots"][:num_decodes] = [s.slots[-1] for s in decodes]
        at["window_slots"][:num_decodes] = [s.windowed[-1] for s in decodes]
        at["starts"][: padded + 1] = np.arange(padded + 1)
        token = padded
        for i, share in enumerate(prompts, padded):
            end = token + share.num_tokens
            at["token_ids"][token:end] = share.token_ids
            at["positions"][token:end] = np.arange(share.start, share.start + share.num_tokens)
            at["slots"][token:end] = share.slots[-share.num_tokens :]
            at["window_slots"][token:end] = share.windowed[-share.num_tokens :]
            at["rows"][i] = share.row
            at["lens"][i] = share.start + share.num_tokens
            at["starts"][i + 1] = token = end
        at["starts"][padded + len(prompts) + 1 :] = token
        at["num_tokens"][0] = token
        self.packed.copy_(host.pin_memory() if self.packed.is_cuda else host, non_blocking=True)


class MixedGraphs:
    """Captured graphs by size; `run` replays the smallest that holds the step."""

    def __init__(self, decoder: Decoder, rows: Rows, caches: Caches, sizes: list[Size], device: torch.device) -> None:
        self.decoder, self.rows, self.caches, self.device = decoder, rows, caches, device
        self.sizes = sizes
        self.buffers = {size: MixedBuffers.allocate(size, device) for size in sizes}
        self.graphs: dict[Size, Captured] = {}

    def capture(self) -> None:
        """Capture every size."""
        nothing, scratch = StepPlan(0, [], np.empty((0, 2), np.int32)), self.rows.scratch
        self.graphs = capture_each(
            self.sizes, lambda size: self.buffers[size].load(nothing, size, scratch), self.forward
        )

    def forward(self, size: Size) -> Tensor:
        """One step over the buffers of `size` -> final hidden states [D + T, width]. This is what a graph holds."""
        fields, d = self.buffers[size].fields, size.decodes
        slots = [fields["slots"], fields["window_slots"]][: self.rows.num_tables]
        decoded = self.rows.enter_decode(fields["rows"][:d], fields["positions"][:d], [s[:d] for s in slots])
        batch = Batch(
            token_ids_T=torch.cat([decoded, fields["token_ids"][d:]]),
            positions_T=fields["positions"],
            slots_T=fields["slots"],
            rows_B=fields["rows"],
            starts_B1=fields["starts"],
            lens_B=fields["lens"],
            slot_table_RC=self.rows.slot_table_RC,
            max_query=size.tokens,
            max_len=self.rows.slot_table_RC.shape[1],
            num_decodes=d,
            num_tokens_1=fields["num_tokens"],
            kv=self.caches.kv,
            pool_SLK=self.caches.pool.tensor_SLK if self.caches.pool else None,
            windowed=self.rows.windowed(slots),
        )
        if self.caches.pool:
            self.caches.pool.fill(fields["slots"])
        return self.decoder(batch)

    def size_for(self, plan: StepPlan) -> Size | None:
        """The smallest captured size that holds the step, or None; prompt log-probabilities are read eagerly only."""
        decodes = plan.num_decodes
        tokens, prompts = plan.num_tokens - decodes, len(plan.shares) - decodes
        if any(s.logprobs_from is not None for s in plan.shares):
            return None
        fitting = (
            size
            for size in self.sizes
            if size.decodes >= decodes and size.tokens >= tokens and size.prompts >= prompts and size in self.graphs
        )
        return min(fitting, key=lambda size: size.decodes + size.tokens, default=None)

    def run(self, plan: StepPlan, size: Size) -> tuple[Tensor, Tensor, Tensor]:
        """Replay for this step -> (hidden states [D + T, width], which of them are sampled, their rows; int32 [N])."""
        num_decodes = plan.num_decodes
        self.buffers[size].load(plan, size, self.rows.scratch)
        prompts = plan.shares[num_decodes:]
        sampled = [*range(num_decodes), *_last_tokens(prompts, size.decodes)]
        rows = [s.row for s in plan.shares if s.samples]
        entering = table_arrays(prompts, self.rows.num_tables)
        arrays = [np.array(sampled, np.int32), np.array(rows, np.int32), *entering]
        sampled_N, rows_N, *entered = upload(arrays, self.device)
        self.rows.enter_prefills(*entered)
        graph, hidden_TD = self.graphs[size]
        graph.replay()
        return hidden_TD, sampled_N, rows_N


def _last_tokens(prompts: list[Share], first: int) -> list[int]:
    """Where the last token of each sampling prompt share lies, when the first share begins at `first`."""
    found = []
    for share in prompts:
        first += share.num_tokens
        if share.samples:
            found.append(first - 1)
    return found
