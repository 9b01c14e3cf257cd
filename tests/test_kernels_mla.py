"""Latent attention's ops on the CPU (the torch references) against float64, and what they refuse."""

from __future__ import annotations

import mla_checks as checks
import pytest
import torch
from mla_checks import Widths

from tracklayer.kernels import mla
from tracklayer.kernels.mla_attention import fitting, latent_attention
from tracklayer.kernels.rope import rope_table

F32 = torch.float32
SMALL = Widths(3, 10, 6, 7, 12, 9)
NO_LATENT = Widths(5, 16, 8, 16, 32, None)
RULES = [{}, {"rope": None}, {"rope": "yarn", "interleaved": True}, {"interleaved": True}]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule) or "plain")
@pytest.mark.parametrize("w", [SMALL, NO_LATENT, Widths(2, 8, 0, 8, 16, 24)], ids=str)
def test_references(w, rule):
    for tokens in (0, 1, 70):
        checks.check_absorb(w, tokens, "cpu", F32, **rule)
        checks.check_latent_store(w, tokens, "cpu", F32, **rule, eps=0.2, offset=0.5, kv_scale=0.7)


def test_attention_reference():
    checks.check_attention([1, 1, 21, 9, 1, 0], [70, 1, 60, 9, 40, 5], SMALL, "cpu", F32, num_decodes=2)
    checks.check_attention([1] * 4, [1, 60, 0, 33], NO_LATENT, "cpu", F32)


def test_kernels_and_references_agree_on_their_names():
    """Each op's reference, called by itself, gives what the op gives."""
    q, w = torch.randn(4, 3, 16), torch.randn(3, 17, 12)
    table, positions = rope_table(6, 1e4, None, 64), torch.arange(4).int()
    whole = mla.absorb_queries(q, w[:, :10], table, positions)
    torch.testing.assert_close(whole, mla.absorb_queries_ref(q, w[:, :10], table, positions))
    mla.turn_tails_ref(q, table, positions, rope_dim=6)
    torch.testing.assert_close(q[..., 10:], whole[..., 12:])
    out = mla.head_products(whole[..., :12], w[:, 10:], torch.empty(4, 3, 7))
    torch.testing.assert_close(mla.head_products_ref(whole[..., :12], w[:, 10:], torch.empty(4, 3, 7)), out)


@pytest.mark.parametrize(
    ("columns", "q_norm", "cache", "table", "word"),
    [
        (16, None, (1, 18), 6, "does not hold"),
        (26, 9, (1, 18), 6, "does not hold"),
        (27, 9, (1, 17), 6, "cache keeps"),
        (27, 9, (2, 18), 6, "cache keeps"),
        (27, 9, (1, 18), 4, "6 dims can not be turned by a table 4 wide"),
    ],
)
def test_widths_that_do_not_fit_are_named(columns, q_norm, cache, table, word):
    where = torch.zeros(2).int(), torch.zeros(2).int(), torch.zeros(5, *cache)
    gain = None if q_norm is None else torch.ones(q_norm)
    with pytest.raises(ValueError, match=word):
        mla.latent_store(
            torch.zeros(2, columns), torch.zeros(9, table), *where, kv_norm_C=torch.ones(12), q_norm_Q=gain, rope_dim=6,
            eps=1e-6,
        )  # fmt: skip


def test_queries_that_do_not_fit_are_refused():
    positions = torch.zeros(2).int()
    with pytest.raises(ValueError, match="do not fit 4 heads of 10"):
        mla.absorb_queries(torch.zeros(2, 3, 16), torch.zeros(4, 10, 12), None, positions)
    with pytest.raises(ValueError, match="do not fit 3 heads of 17"):
        mla.absorb_queries(torch.zeros(2, 3, 16), torch.zeros(3, 17, 12), None, positions)
    with pytest.raises(ValueError, match="can not be turned"):
        mla.absorb_queries(torch.zeros(2, 3, 16), torch.zeros(3, 10, 12), torch.zeros(9, 4), positions)
    q, cache, keywords = checks.latent_case([1], [5], SMALL, "cpu", F32)
    for queries, keys, value_dim in ((q, cache[..., :17], 12), (q, cache, 19), (q, cache.expand(-1, 2, -1), 12)):
        with pytest.raises(ValueError, match="do not fit a cache"):
            latent_attention(queries, keys, value_dim=value_dim, max_query=1, **keywords)


@pytest.mark.parametrize("shared", [99, 163, 227])
@pytest.mark.parametrize(("rows", "itemsize"), [(64, 2), (16, 2), (16, 4)])
def test_blocks_fit_in_shared_memory(rows, itemsize, shared):
    block, stages = fitting(576, rows, itemsize, shared << 10)
    in_flight = stages // 2 if rows < 64 else stages - 1  # as the compiler counts
    assert (block * in_flight + rows) * 576 * itemsize <= shared << 10
    assert block >= (64 if shared == 227 and itemsize == 2 else 16)
