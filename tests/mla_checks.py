"""Latent attention's kernels against float64: tiny in the interpreter, at real widths on a GPU. T tokens, N heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from kernel_checks import close
from torch import Tensor

from tracklayer.kernels import mla, mla_attention
from tracklayer.kernels.rope import rope_table


@dataclass(frozen=True)
class Widths:
    """A model's latent attention: heads, dims of a head without and with position, of its value, and both latents."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    q_latent: int | None

    def __str__(self) -> str:
        return f"{self.heads}x{self.nope}+{self.rope}x{self.value}-{self.latent}-{self.q_latent}"


def poisoned(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, device=device, dtype=dtype)


def turned(x: Tensor, table: Tensor | None, positions: Tensor, interleaved: bool) -> Tensor:
    """Complex rotation in float64 of [T, H, R] by the table's angles and lengths."""
    if table is None:
        return x.double()
    cos, sin = table[positions.long()].double()[:, None].chunk(2, -1)
    pairs = x.double().unflatten(-1, (-1, 2)) if interleaved else torch.stack(x.double().chunk(2, -1), -1)
    z = torch.complex(*pairs.unbind(-1)) * torch.complex(cos, sin)
    return torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)


def table_of(w: Widths, kind: str | None, device: str) -> Tensor | None:
    """A plain table, one whose attention factor is not 1 (yarn), or none."""
    if kind is None or w.rope == 0:
        return None
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16}
    return rope_table(w.rope, 1e4, yarn if kind == "yarn" else None, 64, device)


def check_latent_store(
    w: Widths, tokens: int, device: str, dtype: torch.dtype, *, rope: str | None = "plain", interleaved: bool = False,
    eps: float = 1e-6, offset: float = 0.0, kv_scale: float = 1.0,
) -> None:  # fmt: skip
    front = w.q_latent or w.heads * (w.nope + w.rope)
    down = torch.randn(tokens, front + w.latent + w.rope, device=device).to(dtype)
    before = down.double()
    q_norm = torch.randn(front, device=device).to(dtype) if w.q_latent else None
    kv_norm, table = torch.randn(w.latent, device=device).to(dtype), table_of(w, rope, device)
    positions = torch.randint(0, 64, (tokens,), device=device).int()
    slots = torch.randperm(2 * tokens + 3, device=device)[:tokens].int()
    cache = poisoned(2 * tokens + 3, 1, w.latent + w.rope + 5, device=device, dtype=dtype)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)

    rule = dict(eps=eps, offset=offset, kv_scale=kv_scale, interleaved=interleaved)
    given = (table, positions, slots)
    q, latent, tail = mla.latent_store(down, *given, cache, kv_norm_C=kv_norm, q_norm_Q=q_norm, rope_dim=w.rope, **rule)
    assert q.data_ptr() == down.data_ptr() and latent.stride(0) == down.stride(0), "views, not copies"
    q_before, latent_before, tail_before = before.split([front, w.latent, w.rope], -1)
    close(q, q_before if q_norm is None else rms(q_before, q_norm), dtype)
    close(latent, rms(latent_before, kv_norm) * kv_scale, dtype)
    if w.rope:
        close(tail, turned(tail_before[:, None], table, positions, interleaved)[:, 0], dtype)
    assert cache[slots.long(), 0, : w.latent + w.rope].equal(down[:, front:]), "the cache holds what was returned"
    cache[slots.long(), 0, : w.latent + w.rope] = math.nan
    assert cache.isnan().all(), "other slots and the columns behind are left alone"


def check_absorb(
    w: Widths, tokens: int, device: str, dtype: torch.dtype, *, rope: str | None = "plain", interleaved: bool = False
) -> None:
    """Queries that are part of a wider row, weights that are part of each head's."""
    wide = torch.randn(tokens, w.heads * (w.nope + w.rope) + 7, device=device).to(dtype)
    q = wide[:, 7:].unflatten(-1, (w.heads, -1))
    kept = wide.clone()
    both = torch.randn(w.heads, w.nope + w.value, w.latent, device=device).to(dtype)
    weight, table = both[:, : w.nope], table_of(w, rope, device)
    positions = torch.randint(0, 64, (tokens,), device=device).int()
    got = mla.absorb_queries(q, weight, table, positions, interleaved=interleaved)
    want = torch.einsum("tnp,npc->tnc", q[..., : w.nope].double(), weight.double())
    close(got[..., : w.latent], want, dtype)
    assert wide.equal(kept), "the queries are left alone"
    if w.rope:
        tails = turned(q[..., w.nope :], table, positions, interleaved)
        close(got[..., w.latent :], tails, dtype)
        if table is not None:
            mla.turn_tails(q, table, positions, rope_dim=w.rope, interleaved=interleaved)
        close(q[..., w.nope :], tails, dtype)
        q[..., w.nope :] = kept[:, 7:].unflatten(-1, (w.heads, -1))[..., w.nope :]
        assert wide.equal(kept), "only tails were turned"
    out = poisoned(tokens + 2, w.heads, w.value, device=device, dtype=dtype)
    made = mla.head_products(got[..., : w.latent], both[:, w.nope :], out[1:-1])
    assert made.data_ptr() == out[1:-1].data_ptr() and out[[0, -1]].isnan().all()
    close(made, torch.einsum("tnc,nec->tne", got[..., : w.latent].double(), both[:, w.nope :].double()), dtype)


def latent_case(
    counts: list[int], lens: list[int], w: Widths, device: str, dtype: torch.dtype, extra: int = 0
) -> tuple[Tensor, Tensor, dict]:
    """(q, cache, keywords): slots no sequence owns are NaN, the table holds junk past each end."""
    slots, sequences, width = sum(lens) + 3, len(counts), w.latent + w.rope
    cache = poisoned(slots, 1, width + extra, device=device, dtype=dtype)
    table = torch.randint(0, slots, (sequences + 2, max(lens) + 1), device=device, dtype=torch.int32)
    free = 1 + torch.randperm(slots - 1, device=device)
    rows = torch.randperm(sequences + 2, device=device)[:sequences]
    for row, length in zip(rows.tolist(), lens, strict=True):
        own, free = free[:length], free[length:]
        table[row, :length] = own.int()
        cache[own, 0, :width] = torch.randn(length, width, device=device).to(dtype)
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    q = torch.randn(sum(counts), w.heads, width, device=device).to(dtype)
    where = dict(slot_table_RC=table, rows_B=rows.int(), starts_B1=starts)
    return q, cache, dict(**where, lens_B=torch.tensor(lens, device=device).int(), max_len=max(lens), scale=0.2)


def check_attention(
    counts: list[int], lens: list[int], w: Widths, device: str, dtype: torch.dtype, *, num_decodes: int = 0,
    schedule: mla_attention.Schedule | None = None,
) -> None:  # fmt: skip
    q, cache, keywords = latent_case(counts, lens, w, device, dtype, extra=9)
    got = mla_attention.latent_attention(
        q, cache, value_dim=w.latent, max_query=max(counts), num_decodes=num_decodes, schedule=schedule, **keywords
    )
    close(got, exact(q, cache, w, **keywords), dtype)


def exact(q: Tensor, cache: Tensor, w: Widths, *, scale: float, **where) -> Tensor:
    """Token by token in float64."""
    table, rows, starts, lens = (where[k].tolist() for k in ("slot_table_RC", "rows_B", "starts_B1", "lens_B"))
    out = torch.zeros(*q.shape[:2], w.latent, dtype=torch.float64, device=q.device)
    for b, length in enumerate(lens):
        for t in range(starts[b], starts[b + 1]):
            seen = table[rows[b]][: length - (starts[b + 1] - 1 - t)] if length else []
            k = cache[seen, 0, : w.latent + w.rope].double()
            out[t] = (q[t].double() @ k.T * scale).softmax(-1) @ k[:, : w.latent]
    return out
