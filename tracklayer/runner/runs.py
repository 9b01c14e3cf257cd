"""A step's sequences as the runs that recurrent mixers walk (see layers/batch.py). T tokens, B sequences, M places."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tracklayer.layers.batch import Run

Array = npt.NDArray[Any]
FIELDS = 4  # arrays of one run


def group(counts_B: Array) -> list[Array]:
    """Sequences by similar length: each has over half of its longest tokens, so under half of a run is padding."""
    groups: list[list[int]] = []
    for b in np.argsort(-counts_B, kind="stable"):
        if not groups or 2 * counts_B[b] <= counts_B[groups[-1][0]]:
            groups.append([])
        groups[-1].append(int(b))
    return [np.array(members) for members in groups]


def run_arrays(counts_B: Array, starts_B1: Array, rows_B: Array, firsts_B: Array) -> list[Array]:
    """Flat int32 arrays to upload: order [T], then FIELDS of each run. firsts_B: first positions."""
    order_T = np.empty(int(starts_B1[-1]), np.int32)
    arrays, base = [order_T], 0
    for members in group(counts_B):
        counts, starts = counts_B[members], starts_B1[members]
        places = int(counts.max())
        within = np.minimum(np.arange(places), counts[:, None] - 1)
        tokens = starts[:, None] + within
        order_T[tokens] = base + np.arange(len(members))[:, None] * places + within
        base += tokens.size
        arrays += [tokens.ravel(), counts, rows_B[members], firsts_B[members] == 0]
    return arrays


def runs_of(uploaded: list[Tensor]) -> tuple[list[Run], Tensor]:
    """The arrays of `run_arrays`, on the device, as runs and the order."""
    runs = []
    for at in range(1, len(uploaded), FIELDS):
        tokens, counts, rows, fresh = (x.long() for x in uploaded[at : at + FIELDS])
        runs.append(Run(tokens.view(len(counts), -1), counts, rows, fresh.bool()))
    return runs, uploaded[0].long()


def decode_run(rows_B: Tensor, lens_B: Tensor) -> Run:
    """One token a sequence, in order; on the device alone, so that a CUDA graph can hold it."""
    tokens_B = torch.arange(len(rows_B), device=rows_B.device)
    return Run(tokens_B[:, None], torch.ones_like(tokens_B), rows_B.long(), lens_B == 1)
