"""Paged attention: every token of a step against the cached keys and values of its own sequence.

T tokens, B sequences, R rows of the slot table, C context length, S cache slots, N query heads, H key heads
(N = G * H), D key width, E value width.

What a query sees and how its scores are made is the `Rule`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels import attention_hopper
from tracklayer.kernels.attention_decode import paged_decode
from tracklayer.kernels.attention_prefill import paged_prefill
from tracklayer.kernels.attention_rule import Rule
from tracklayer.kernels.dispatch import use_triton

NEG_INF = float("-inf")
FRESH_LEAST = 256  # tokens of a step that begin sequences, from which reading them without the slot table pays


def paged_attention(
    q_TND: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    rule: Rule,
    *,
    slot_table_RC: Tensor,
    rows_B: Tensor,
    starts_B1: Tensor,
    lens_B: Tensor,
    max_query: int,
    max_len: int,
    num_decodes: int = 0,
    step_kv: tuple[Tensor, Tensor] | None = None,
    fresh: tuple[Tensor | None, Tensor] | None = None,
) -> Tensor:
    """Attend; the step's own keys and values are in the caches already. Returns [T, N, E] in q's dtype.

    Sequence b: its query tokens starts_B1[b] .. starts_B1[b+1] are its last positions, lens_B[b] tokens of it are in
    the cache, position p lies at slot slot_table_RC[rows_B[b], p]. Index tensors int32; max_query and max_len are
    host ints, upper bounds of the query tokens and of lens (max_query == 1: exactly one token a sequence, T == B).
    num_decodes: that many first sequences have one token each (the decode kernel serves them apart from the others).
    step_kv, fresh: this step's own (k [T, H, D], v [T, H, E]), and lens_B twice, int32: with -1 for sequences that
    begin in this step (None when all do), and with -1 for the others. Those that begin are then read from step_kv,
    without the slot table.
    Under a rule with `block` each sequence's tokens are whole blocks of that many, and more than one.
    A sequence with lens 0 (padding) gets zeros. Tokens outside every sequence are not written.
    Raises ValueError when the head counts or widths do not fit together.
    """
    _check(q_TND, k_SHD, v_SHE)
    where = dict(slot_table_RC=slot_table_RC, rows_B=rows_B, starts_B1=starts_B1, lens_B=lens_B)
    if not use_triton(q_TND):
        return paged_attention_ref(q_TND, k_SHD, v_SHE, rule, max_query=max_query, max_len=max_len, **where)
    num_decodes = len(lens_B) if max_query == 1 else num_decodes
    out_TNE = None
    if fresh is not None and step_kv is not None:
        out_TNE = q_TND.new_empty(*q_TND.shape[:2], v_SHE.shape[2])
        prompt_attention(q_TND, *step_kv, rule, starts_B1=starts_B1, lens_B=fresh[1], out_TNE=out_TNE)
        if fresh[0] is None:
            return out_TNE
        where["lens_B"] = fresh[0]
    return launch_paged_attention(
        q_TND, k_SHD, v_SHE, rule, num_decodes=num_decodes, max_len=max_len, out_TNE=out_TNE, **where
    )


def prompt_attention(
    q_TND: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    rule: Rule,
    *,
    starts_B1: Tensor,
    lens_B: Tensor,
    out_TNE: Tensor,
) -> Tensor:
    """The same over whole prompts, with the step's own keys and values: no cache, no slot table. Returns out_TNE.

    Only sequences with lens_B > 0, which is then the number of their tokens, are attended; other rows are left alone.
    """
    where = dict(starts_B1=starts_B1, lens_B=lens_B, out_TNE=out_TNE)
    if not use_triton(q_TND):
        return _prompt_attention_ref(q_TND, k_THD, v_THE, rule, **where)
    if attention_hopper.serves(q_TND, k_THD, v_THE, rule):
        return attention_hopper.hopper_attention(q_TND, k_THD, v_THE, rule, **where)
    return paged_prefill(q_TND, k_THD, v_THE, rule, slot_table_RC=None, rows_B=None, **where)


def launch_paged_attention(
    q_TND: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    rule: Rule,
    *,
    slot_table_RC: Tensor,
    rows_B: Tensor,
    starts_B1: Tensor,
    lens_B: Tensor,
    num_decodes: int,
    max_len: int,
    out_TNE: Tensor | None = None,
) -> Tensor:
    """Triton launches of `paged_attention`: the first num_decodes sequences, then the others, into one result.

    Rows of sequences with lens -1 (in `out_TNE` already) are left alone; decoding ones never have it.
    """
    out_TNE = q_TND.new_empty(*q_TND.shape[:2], v_SHE.shape[2]) if out_TNE is None else out_TNE
    n = num_decodes
    assert not (n and rule.block), "a block has more than one token"
    if n:
        paged_decode(
            q_TND[:n], k_SHD, v_SHE, rule, slot_table_RC=slot_table_RC, rows_B=rows_B[:n], lens_B=lens_B[:n],
            max_len=max_len, out_TNE=out_TNE[:n],
        )  # fmt: skip
    if n < len(lens_B):
        paged_prefill(
            q_TND, k_SHD, v_SHE, rule, slot_table_RC=slot_table_RC, rows_B=rows_B[n:], starts_B1=starts_B1[n:],
            lens_B=lens_B[n:], out_TNE=out_TNE,
        )  # fmt: skip
    return out_TNE


def _check(q_TND: Tensor, k_SHD: Tensor, v_SHE: Tensor) -> None:
    heads, kv_heads = q_TND.shape[1], k_SHD.shape[1]
    if heads % kv_heads or v_SHE.shape[1] != kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} key and {v_SHE.shape[1]} value heads evenly")
    if q_TND.shape[2] != k_SHD.shape[2]:
        raise ValueError(f"query width {q_TND.shape[2]} differs from key width {k_SHD.shape[2]}")


def paged_attention_ref(
    q_TND: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    rule: Rule,
    *,
    slot_table_RC: Tensor,
    rows_B: Tensor,
    starts_B1: Tensor,
    lens_B: Tensor,
    max_query: int,
    max_len: int,
) -> Tensor:
    """The torch reference of `paged_attention`: sequences with one query token in one batch, others in a loop."""
    out_TNE = q_TND.new_zeros(*q_TND.shape[:2], v_SHE.shape[2])
    starts, lens = starts_B1.tolist(), lens_B.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    single = [b for b, (count, n) in enumerate(zip(counts, lens, strict=True)) if count == 1 and n > 0]
    batched = len(single) > 1
    if batched:
        index = torch.tensor(single, device=q_TND.device)
        tokens, lens_b = starts_B1[index].long(), lens_B[index].long()
        slots_BL = slot_table_RC[rows_B[index].long(), : max(lens[b] for b in single)].long()
        # Positions past a short sequence's end, or that left its window, may hold any slot number, and any slot NaN,
        # which a mask would not hide: read the sequence's own last slot there.
        inside_BL = torch.arange(slots_BL.shape[1], device=q_TND.device) < lens_b[:, None]
        seen_BnL = _seen(lens_b[:, None] - 1, slots_BL.shape[1], rule) & inside_BL[:, None]
        slots_BL = torch.where(seen_BnL[:, 0], slots_BL, slots_BL.gather(1, lens_b[:, None] - 1))
        k_BLHD, v_BLHE = (_rows(cache, slots_BL) for cache in (k_SHD, v_SHE))
        out_TNE[tokens] = _attend(q_TND[tokens][:, None], k_BLHD, v_BLHE, seen_BnL, rule)[:, 0]
    for b, (count, n) in enumerate(zip(counts, lens, strict=True)):
        if n > 0 and (count > 1 or (count == 1 and not batched)):
            tokens = slice(starts[b], starts[b + 1])
            slots_1L = slot_table_RC[rows_B[b], :n][None]
            positions = torch.arange(n - count, n, device=q_TND.device)[None]
            seen = None if count == n and rule.causal else _seen(positions, n, rule)
            if seen is not None:
                slots_1L = torch.where(seen.any(1), slots_1L, slots_1L[:, -1:])
            k_1LHD, v_1LHE = (_rows(cache, slots_1L) for cache in (k_SHD, v_SHE))
            out_TNE[tokens] = _attend(q_TND[None, tokens], k_1LHD, v_1LHE, seen, rule)[0]
    return out_TNE


def _prompt_attention_ref(
    q_TND: Tensor, k_THD: Tensor, v_THE: Tensor, rule: Rule, *, starts_B1: Tensor, lens_B: Tensor, out_TNE: Tensor
) -> Tensor:
    """The paged reference over the step itself as the cache, in which a sequence's slots follow one another."""
    longest, end = int(lens_B.max()), int(starts_B1[-1])
    if longest < 1:
        return out_TNE
    where = dict(
        slot_table_RC=starts_B1[:-1, None] + torch.arange(longest, device=q_TND.device),
        rows_B=torch.arange(len(lens_B), device=q_TND.device),
        starts_B1=starts_B1,
        lens_B=lens_B,
    )
    found_TNE = paged_attention_ref(q_TND, k_THD, v_THE, rule, max_query=longest, max_len=longest, **where)
    attended_T = (lens_B > 0).repeat_interleave(starts_B1.diff())
    out_TNE[:end][attended_T] = found_TNE[:end][attended_T]
    return out_TNE


def _rows(cache_SHD: Tensor, slots_BL: Tensor) -> Tensor:
    """cache[slots]: [B, L, H, D]; index_select copies whole rows, twice as fast as indexing on a CPU."""
    return cache_SHD.index_select(0, slots_BL.flatten()).unflatten(0, slots_BL.shape)


def _seen(positions_Bn: Tensor, length: int, rule: Rule) -> Tensor:
    """bool [B, n, L]: which cached positions the tokens at `positions_Bn` see."""
    key_L = torch.arange(length, device=positions_Bn.device)
    p_Bn1 = positions_Bn[..., None]
    seen = key_L <= (p_Bn1 if rule.block is None else p_Bn1 - p_Bn1 % rule.block + rule.block - 1)
    if rule.window is not None:
        seen &= key_L > p_Bn1 - rule.window
    if rule.chunk is not None:
        seen &= key_L >= p_Bn1 - p_Bn1 % rule.chunk
    return seen


def _attend(q_BnND: Tensor, k_BLHD: Tensor, v_BLHE: Tensor, seen_BnL: Tensor | None, rule: Rule) -> Tensor:
    """Dense attention; seen_BnL None: causal over a whole prompt. Returns [B, n, N, E] in q's dtype."""
    if rule.softmax:
        mask = None if seen_BnL is None else seen_BnL[:, None]
        out = F.scaled_dot_product_attention(
            q_BnND.transpose(1, 2),
            k_BLHD.transpose(1, 2).to(q_BnND.dtype),
            v_BLHE.transpose(1, 2).to(q_BnND.dtype),
            attn_mask=mask,
            is_causal=mask is None,
            scale=rule.scale,
            enable_gqa=q_BnND.shape[2] != k_BLHD.shape[2],
        )
        return out.transpose(1, 2)
    if seen_BnL is None:
        n = q_BnND.shape[1]
        seen_BnL = torch.ones(1, n, n, dtype=torch.bool, device=q_BnND.device).tril()
    heads, kv_heads = q_BnND.shape[2], k_BLHD.shape[2]
    q_BHGnD = q_BnND.float().unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4)
    score = q_BHGnD @ k_BLHD.float().permute(0, 2, 3, 1)[:, :, None] * rule.scale
    if rule.softcap is not None:
        score = rule.softcap * torch.tanh(score / rule.softcap)
    score = score.masked_fill(~seen_BnL[:, None, None], NEG_INF)
    if rule.sinks_N is not None:
        sink = rule.sinks_N.float().view(1, kv_heads, -1, 1, 1).expand(*score.shape[:-1], 1)
        weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    else:
        weight = score.softmax(-1)
    out = weight @ v_BLHE.float().permute(0, 2, 1, 3)[:, :, None]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q_BnND.dtype)
