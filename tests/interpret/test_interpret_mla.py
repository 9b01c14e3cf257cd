"""Latent attention's kernels in the interpreter: odd widths and head counts, poisoned slots, each rule's options."""

from __future__ import annotations

import mla_checks as checks
import pytest
import torch
from mla_checks import Widths

from tracklayer.kernels import mla, mla_attention
from tracklayer.kernels.mla_attention import Schedule, lone_splits

F32 = torch.float32
SMALL = Widths(3, 10, 6, 7, 12, 9)
WIDTHS = [SMALL, Widths(5, 16, 8, 16, 32, None), Widths(2, 24, 16, 40, 16, 48)]
RULES = [
    {},
    {"rope": None},
    {"rope": "yarn", "interleaved": True},
    {"interleaved": True, "eps": 0.3, "offset": 1.0},
    {"kv_scale": 1.7},
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    for module in (mla, mla_attention):
        monkeypatch.setattr(module, "use_triton", lambda x: True)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule) or "plain")
@pytest.mark.parametrize("w", WIDTHS, ids=str)
def test_latent_store(w, rule):
    for tokens in (0, 1, 5):
        checks.check_latent_store(w, tokens, "cpu", F32, **rule)


@pytest.mark.parametrize("rule", RULES[:4], ids=lambda rule: "-".join(rule) or "plain")
@pytest.mark.parametrize("w", WIDTHS, ids=str)
def test_products_of_heads(w, rule, monkeypatch):
    rule = {k: v for k, v in rule.items() if k in ("rope", "interleaved")}
    for tokens, few in ((1, 64), (19, 64), (19, 4)):  # by the kernel and by the BLAS library
        monkeypatch.setattr(mla, "FEW", few)
        checks.check_absorb(w, tokens, "cpu", F32, **rule)


SCHEDULES = [Schedule(block=16, splits=1), Schedule(block=16, splits=3, rows=16), Schedule(block=32, splits=5)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.block}-{s.splits}-{s.rows}")
@pytest.mark.parametrize("w", [*WIDTHS, Widths(40, 8, 4, 8, 16, None)], ids=str)
def test_decode(w, schedule):
    lens = [1, 170, 33, 0, 96]
    checks.check_attention([1] * 5, lens, w, "cpu", F32, num_decodes=5, schedule=schedule)


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("w", WIDTHS, ids=str)
def test_chunks_beside_decodes(w, rows):
    """Some decode, a chunk follows a past, a prompt begins, one has a token but is no decode, one has none."""
    checks.check_attention(
        [1, 1, 21, 9, 1, 0], [70, 1, 60, 9, 40, 5], w, "cpu", F32, num_decodes=2,
        schedule=Schedule(rows=rows, block=16, splits=2),
    )  # fmt: skip


def test_splits_fill_the_device_in_whole_turns():
    """One alone takes nearly all multiprocessors; a count just above them is cut finer; nothing gets no keys."""
    assert 60 <= lone_splits(1, 2, 32768, 64, 132) <= 66
    assert lone_splits(16, 2, 40960, 64, 132) * 32 in range(100, 133)
    assert lone_splits(64, 2, 32768, 64, 132) == lone_splits(256, 2, 32768, 64, 132) == 1
    turns = -(-140 * lone_splits(70, 2, 32768, 64, 132) // 132) / lone_splits(70, 2, 32768, 64, 132)
    assert turns < 1.2 < 2
    assert lone_splits(1, 1, 100, 64, 132) == 1 and lone_splits(1, 1, 1 << 20, 64, 132) > 60


def test_sequences_marked_as_others_are_left_alone():
    q, cache, keywords = checks.latent_case([5, 4], [9, 4], SMALL, "cpu", F32)
    want = checks.exact(q, cache, SMALL, **keywords)
    keywords["lens_B"] = torch.tensor([9, -1], dtype=torch.int32)
    cache[keywords["slot_table_RC"][keywords["rows_B"][1].long(), :4].long()] = torch.nan
    got = mla_attention.launch_latent_attention(q, cache, value_dim=12, num_decodes=0, **keywords)
    checks.close(got[:5], want[:5], F32)
