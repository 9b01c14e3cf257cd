"""The device's and the host's memory of running requests, by row. R rows, C context length, V vocabulary.

A row is laid when its request is admitted and stays until it ends. Row R, one past the last, is scratch: padded
lines of a CUDA graph use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracklayer.types import TOP_K_ALL, EngineRequest, Share

SAMPLING_DEFAULTS: dict[str, tuple[type, float]] = {
    "temperature": (np.float32, 1.0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "frequency": (np.float32, 0.0),
    "presence": (np.float32, 0.0),
    "repetition": (np.float32, 1.0),
    "top_k": (np.int32, TOP_K_ALL),
    "seed": (np.int64, 0),
}


class Rows:
    """slot_table_RC and last_token_R live on the device, requests and sampling numbers on the host.

    tables: slot_table_RC, and with `windowed` one more of layers that see a window only and keep slots of their own.
    """

    def __init__(self, num_rows: int, context_length: int, device: torch.device, *, windowed: bool = False) -> None:
        self.scratch = num_rows
        self.device = device
        self.tables = [
            torch.zeros(num_rows + 1, context_length, dtype=torch.int32, device=device) for _ in range(1 + windowed)
        ]
        self.slot_table_RC = self.tables[0]
        self.last_token_R = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.requests: list[EngineRequest | None] = [None] * (num_rows + 1)
        self.sampling = {k: np.full(num_rows + 1, v, t) for k, (t, v) in SAMPLING_DEFAULTS.items()}
        self.output_counts_RV: Tensor | None = None
        self.prompt_seen_RV: Tensor | None = None
        self.admissions = 0

    def admit(self, share: Share, vocab_size: int) -> None:
        """Lay the row of a request that was just (re-)admitted."""
        request, row = share.admitted, share.row
        assert request is not None
        params = request.sampling
        self.admissions += 1
        self.requests[row] = request
        values = {
            "temperature": 0.0 if params.greedy else params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
            "repetition": params.repetition_penalty,
            "top_k": TOP_K_ALL if params.top_k == -1 else min(params.top_k, TOP_K_ALL),
            "seed": request.seed,
        }
        for name, value in values.items():
            self.sampling[name][row] = value
        if params.penalised:
            self._lay_penalties(row, request, share.history or request.input_ids, vocab_size)

    def _lay_penalties(self, row: int, request: EngineRequest, history: list[int], vocab_size: int) -> None:
        if self.output_counts_RV is None or self.prompt_seen_RV is None:
            rows = len(self.requests)
            self.output_counts_RV = torch.zeros(rows, vocab_size, dtype=torch.int32, device=self.device)
            self.prompt_seen_RV = torch.zeros(rows, vocab_size, dtype=torch.bool, device=self.device)
        prompt_len = len(request.input_ids)
        self.prompt_seen_RV[row] = False
        self.prompt_seen_RV[row, torch.tensor(history[:prompt_len], device=self.device)] = True
        output = torch.tensor(history[prompt_len:], dtype=torch.long)
        self.output_counts_RV[row] = torch.bincount(output, minlength=vocab_size).to(self.device, torch.int32)

    def count_output(self, rows_N: Tensor, ids_N: Tensor) -> None:
        """Remember sampled tokens for the penalties (rows are distinct)."""
        if self.output_counts_RV is not None:
            index = (rows_N.long(), ids_N.long())
            self.output_counts_RV[index] += 1

    @property
    def num_tables(self) -> int:
        return len(self.tables)

    def windowed(self, slots: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """What Batch calls so, of the slots of a step's tokens by table."""
        return (slots[1], self.tables[1]) if len(self.tables) > 1 else None

    def enter_decode(self, rows_B: Tensor, positions_B: Tensor, slots: Sequence[Tensor]) -> Tensor:
        """Enter the new slots, [B] by table, of sequences that each feed their last token; these tokens, int32 [B]."""
        rows = rows_B.long()
        for table_RC, slots_B in zip(self.tables, slots, strict=True):
            table_RC[rows, positions_B.long()] = slots_B
        return self.last_token_R[rows]

    def enter_prefills(self, rows_X: Tensor, positions_X: Tensor, *slots: Tensor) -> None:
        """Enter the slots of prefill shares, as `table_arrays` lays them (int32, on the device)."""
        for table_RC, slots_X in zip(self.tables, slots, strict=True):
            table_RC[rows_X.long(), positions_X.long()] = slots_X


def step_slots(shares: Sequence[Share], num_tables: int) -> list[NDArray[np.int32]]:
    """Slots of the step's own tokens, int32 [T] by table."""
    kinds = [[s.slots for s in shares], [s.windowed for s in shares]][:num_tables]
    return [
        np.concatenate([slots[-s.num_tokens :] for s, slots in zip(shares, kind, strict=True)])
        if shares
        else np.empty(0, np.int32)
        for kind in kinds
    ]


def table_arrays(shares: Sequence[Share], num_tables: int) -> list[NDArray[np.int32]]:
    """Row, position and, by table, slot (int32 [X] each) of what prefill shares enter, their reused prefixes too."""
    if not shares:
        return [np.empty(0, np.int32)] * (2 + num_tables)
    kinds = [[s.slots for s in shares], [s.windowed for s in shares]][:num_tables]
    return [
        np.repeat(np.array([s.row for s in shares], np.int32), [len(s.slots) for s in shares]),
        np.concatenate([np.arange(s.table_start, s.table_start + len(s.slots), dtype=np.int32) for s in shares]),
        *(np.concatenate(kind) for kind in kinds),
    ]
