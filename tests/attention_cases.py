"""Random paged-attention problems with poisoned slots, and an independent float64 answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracklayer.kernels.attention_rule import Rule


@dataclass
class Case:
    """Query counts and cached lengths per sequence, head counts, widths and the rule's options."""

    counts: list[int]
    lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    width: int = 32
    value_width: int = 32
    options: dict[str, Any] | None = None

    def __str__(self) -> str:
        named = "-".join(f"{k}{v if isinstance(v, (int, float)) else ''}" for k, v in (self.options or {}).items())
        return f"{len(self.counts)}seq-{self.heads}x{self.kv_heads}x{self.width}x{self.value_width}-{named or 'plain'}"


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 7},
    {"chunk": 8},
    {"softcap": 2.0},
    {"sinks_N": True},
    {"window": 5, "sinks_N": True, "softcap": 3.0},
]
SHAPES = [(4, 2, 32, 32), (6, 2, 48, 16), (5, 1, 80, 64), (4, 4, 16, 24)]
DECODE = [
    Case([1, 1, 1, 1], [1, 60, 17, 0], *shape, options=options)
    for shape, options in [(SHAPES[0], o) for o in OPTIONS] + [(s, OPTIONS[i]) for i, s in enumerate(SHAPES)]
]
MIXED = [
    Case([1, 60, 0, 13, 0, 1], [1, 60, 0, 17, 5, 44], *shape, options=options)
    for shape, options in [(SHAPES[0], o) for o in OPTIONS] + [(s, OPTIONS[i]) for i, s in enumerate(SHAPES)]
]

# Whole blocks only: alone, behind a prefix, longer than the kernels' own tiles.
BLOCKS = [
    Case([8, 4, 12, 0], [8, 20, 12, 4], options={"block": 4}),
    Case([96, 32], [96, 160], 6, 2, 48, 16, options={"block": 32}),
    Case([9, 15], [30, 15], 4, 4, 16, 24, options={"block": 3}),
]

# Sequences of several windows or chunks, so that slots have left them.
LEFT = [case for case in DECODE + MIXED if {"window", "chunk"} & set(case.options or {})] + [
    Case([1, 1, 40], [300, 129, 333], *shape, options=options)
    for shape in ((4, 2, 32, 32), (8, 1, 64, 32))
    for options in ({"window": 33}, {"window": 128, "sinks_N": True}, {"chunk": 64})
]


def build(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> tuple[Any, dict]:
    """((q, k, v), keyword arguments of paged_attention): slots no sequence owns, and slot 0, hold NaN."""
    rng = torch.Generator().manual_seed(seed)
    sequences, longest = len(case.counts), max(case.lens)
    slots = sum(case.lens) + 7
    q = torch.randn(sum(case.counts), case.heads, case.width, generator=rng)
    k = torch.full((slots, case.kv_heads, case.width), math.nan)
    v = torch.full((slots, case.kv_heads, case.value_width), math.nan)
    free = 1 + torch.randperm(slots - 1, generator=rng)
    rows = torch.randperm(sequences + 2, generator=rng)[:sequences]
    table = torch.randint(0, slots, (sequences + 2, longest + 3), generator=rng)  # junk past each sequence's end
    for row, length in zip(rows.tolist(), case.lens, strict=True):
        own, free = free[:length], free[length:]
        table[row, :length] = own
        k[own] = torch.randn(length, case.kv_heads, case.width, generator=rng)
        v[own] = torch.randn(length, case.kv_heads, case.value_width, generator=rng)
    options = dict(case.options or {})
    if options.get("sinks_N"):
        options["sinks_N"] = torch.randn(case.heads, generator=rng).to(device)
    starts = torch.tensor([0, *np.cumsum(case.counts).tolist()], dtype=torch.int32, device=device)
    keywords = dict(
        slot_table_RC=table.to(torch.int32).to(device),
        rows_B=rows.to(torch.int32).to(device),
        starts_B1=starts,
        lens_B=torch.tensor(case.lens, dtype=torch.int32, device=device),
        max_query=max(case.counts),
        max_len=longest,
        rule=Rule(0.3, **options),
    )
    return tuple(x.to(dtype).to(device) for x in (q, k, v)), keywords


def exact(q: Tensor, k: Tensor, v: Tensor, rule: Rule, **kw: Any) -> np.ndarray:
    """Token by token, head by head, in float64: [T, N, E]."""
    q, k, v = (x.detach().double().cpu().numpy() for x in (q, k, v))
    table, rows, starts, lens = (kw[x].tolist() for x in ("slot_table_RC", "rows_B", "starts_B1", "lens_B"))
    sinks = None if rule.sinks_N is None else rule.sinks_N.double().cpu().numpy()
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for b, length in enumerate(lens):
        for t in range(starts[b], starts[b + 1]):
            position = length - (starts[b + 1] - t)
            block = rule.block or 1
            seen = [
                j
                for j in range((position // block + 1) * block)
                if (rule.window is None or position - j < rule.window)
                and (rule.chunk is None or j // rule.chunk == position // rule.chunk)
            ]
            if length == 0:
                continue
            slots = [table[rows[b]][j] for j in seen]
            for n in range(q.shape[1]):
                h = n * k.shape[1] // q.shape[1]
                score = k[slots, h] @ q[t, n] * rule.scale
                if rule.softcap:
                    score = rule.softcap * np.tanh(score / rule.softcap)
                weight = np.exp(score)
                total = weight.sum() + (0.0 if sinks is None else np.exp(sinks[n]))
                out[t, n] = weight @ v[slots, h] / total
    return out


def error(out: Tensor, want: np.ndarray) -> float:
    """Relative error in the Frobenius norm; NaN counts as infinite."""
    difference = np.linalg.norm(out.double().cpu().numpy() - want) / max(np.linalg.norm(want), 1e-30)
    return math.inf if math.isnan(difference) else float(difference)


def forget(k: Tensor, v: Tensor, kw: dict[str, Any]) -> int:
    """Drop what no query of the step can see any more: NaN in its slots, slot 0 in the table. How many slots that was.

    Sequences without a query in the step are dropped whole.
    """
    dropped, rule = 0, kw["rule"]
    for b, length in enumerate(kw["lens_B"].tolist()):
        first = length - int(kw["starts_B1"][b + 1] - kw["starts_B1"][b])  # its window begins earliest
        begin = length
        if first < length:
            begin = first - rule.window + 1 if rule.window else first // rule.chunk * rule.chunk
            begin = max(0, begin)
        line = kw["slot_table_RC"][kw["rows_B"][b].long()]
        gone = line[:begin].long()
        k[gone], v[gone] = math.nan, math.nan
        line[:begin] = 0
        dropped += begin
    return dropped
