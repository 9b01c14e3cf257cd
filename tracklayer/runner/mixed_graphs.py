"""CUDA graphs of small steps with prompts in them, where launching kernel by kernel would take longer than running.

D lines for sequences that decode, then T prompt tokens of at most P sequences, all padded: decode lines past the
step's own compute a scratch token (row R, slot 0: page 0 of KV and pool), prompt tokens past it belong to no sequence
and wake no expert. The graph ends with the final hidden states; which of them are sampled differs from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tracklayer.layers.batch import Batch
from tracklayer.models.decoder import Decoder
from tracklayer.runner.batch import ALIGN, upload
from tracklayer.runner.graphs import Captured, capture_each
from tracklayer.runner.kv_cache import Caches
from tracklayer.runner.rows import Rows
from tracklayer.types import Share, StepPlan

Size = tuple[int, int]
MAX_PROMPTS = 64


def ladder(max_rows: int, largest: int) -> list[Size]:
    """(decode lines, prompt tokens) to capture: steps of this many tokens are bound by launches when run eagerly."""
    decodes = sorted({0, *(min(d, max_rows) for d in (16, 64, 256))})
    return [(d, t) for d in decodes for t in (64, 256, 1024) if t <= largest]


@dataclass(slots=True)
class MixedBuffers:
    """Static inputs of one graph, views of one tensor: what `Batch` calls them, and the number of real tokens."""

    packed: Tensor
    fields: dict[str, Tensor]

    @classmethod
    def allocate(cls, size: Size, device: torch.device) -> MixedBuffers:
        tokens, sequences = sum(size), size[0] + MAX_PROMPTS
        lengths = {
            "token_ids": tokens,
            "positions": tokens,
            "slots": tokens,
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
        padded = size[0]
        at["rows"][:] = scratch
        at["lens"][:padded] = 1
        at["rows"][:num_decodes] = [s.row for s in decodes]
        at["lens"][:num_decodes] = [s.start + 1 for s in decodes]
        at["positions"][:num_decodes] = [s.start for s in decodes]
        at["slots"][:num_decodes] = [s.slots[-1] for s in decodes]
        at["starts"][: padded + 1] = np.arange(padded + 1)
        token = padded
        for i, share in enumerate(prompts, padded):
            end = token + share.num_tokens
            at["token_ids"][token:end] = share.token_ids
            at["positions"][token:end] = np.arange(share.start, share.start + share.num_tokens)
            at["slots"][token:end] = share.slots[-share.num_tokens :]
            at["rows"][i] = share.row
            at["lens"][i] = share.start + share.num_tokens
            at["starts"][i + 1] = token = end
        at["starts"][padded + len(prompts) + 1 :] = token
        at["num_tokens"][0] = token
        self.packed.copy_(host.pin_memory(), non_blocking=True)


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
        fields, d = self.buffers[size].fields, size[0]
        decoded = self.rows.enter_decode(fields["rows"][:d], fields["positions"][:d], fields["slots"][:d])
        batch = Batch(
            token_ids_T=torch.cat([decoded, fields["token_ids"][d:]]),
            positions_T=fields["positions"],
            slots_T=fields["slots"],
            rows_B=fields["rows"],
            starts_B1=fields["starts"],
            lens_B=fields["lens"],
            slot_table_RC=self.rows.slot_table_RC,
            max_query=size[1],
            max_len=self.rows.slot_table_RC.shape[1],
            num_decodes=d,
            num_tokens_1=fields["num_tokens"],
            kv=self.caches.kv,
            pool_SLK=self.caches.pool.tensor_SLK if self.caches.pool else None,
        )
        if self.caches.pool:
            self.caches.pool.fill(fields["slots"])
        return self.decoder(batch)

    def size_for(self, plan: StepPlan) -> Size | None:
        """The smallest captured size that holds the step, or None; prompt log-probabilities are read eagerly only."""
        decodes = plan.num_decodes
        tokens = plan.num_tokens - decodes
        if len(plan.shares) - decodes > MAX_PROMPTS or any(s.logprobs_from is not None for s in plan.shares):
            return None
        fitting = (size for size in self.sizes if size[0] >= decodes and size[1] >= tokens and size in self.graphs)
        return min(fitting, key=sum, default=None)

    def run(self, plan: StepPlan, size: Size) -> tuple[Tensor, Tensor]:
        """Replay for this step -> (hidden states [N, width] of the tokens that are sampled, their rows int32 [N])."""
        num_decodes = plan.num_decodes
        self.buffers[size].load(plan, size, self.rows.scratch)
        prompts = plan.shares[num_decodes:]
        sampled = [*range(num_decodes), *_last_tokens(prompts, size[0])]
        rows = [s.row for s in plan.shares if s.samples]
        arrays = [np.array(sampled, np.int32), np.array(rows, np.int32), *(s.slots for s in prompts)]
        sampled_N, rows_N, *slots = upload(arrays, self.device)
        for share, share_slots in zip(prompts, slots, strict=True):
            self.rows.enter_prefill(share, share_slots)
        graph, hidden_TD = self.graphs[size]
        graph.replay()
        return hidden_TD[sampled_N.long()], rows_N


def _last_tokens(prompts: list[Share], first: int) -> list[int]:
    """Where the last token of each sampling prompt share lies, when the first share begins at `first`."""
    found = []
    for share in prompts:
        first += share.num_tokens
        if share.samples:
            found.append(first - 1)
    return found
