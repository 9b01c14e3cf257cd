"""The attention kernels in the interpreter against a float64 loop: odd widths, poisoned slots, every option."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_cases import BLOCKS, DECODE, LEFT, MIXED, Case, build, error, exact, forget

from tracklayer.kernels.attention import launch_paged_attention, paged_attention
from tracklayer.kernels.attention_decode import paged_decode
from tracklayer.kernels.attention_prefill import paged_prefill

BOUND = 1e-5


def without(keywords, *names):
    return {k: v for k, v in keywords.items() if k not in names}


@pytest.mark.parametrize("case", DECODE, ids=str)
@pytest.mark.parametrize("splits", [1, 4])
def test_decode(case, splits):
    tensors, keywords = build(case)
    want = exact(*tensors, **keywords)
    out = paged_decode(*tensors, **without(keywords, "starts_B1", "max_query"), block_l=16, splits=splits)
    assert error(out, want) < BOUND


def test_decode_leaves_its_counters_at_zero():
    """A second launch over the same counters merges as the first did."""
    tensors, keywords = build(DECODE[0])
    run = lambda: paged_decode(*tensors, **without(keywords, "starts_B1", "max_query"), block_l=16, splits=4)  # noqa: E731
    assert run().equal(run())


@pytest.mark.parametrize("case", MIXED, ids=str)
@pytest.mark.parametrize("rows", [16, 32])
def test_prefill(case, rows):
    tensors, keywords = build(case)
    want = exact(*tensors, **keywords)
    out = paged_prefill(*tensors, **without(keywords, "max_query", "max_len"), block_l=16, block_m=rows)
    assert error(out, want) < BOUND


@pytest.mark.parametrize("case", [case for case in LEFT if max(case.counts) == 1], ids=str)
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_reads_nothing_that_left(case, splits):
    """Slots outside every window or chunk may hold anything, and the table may have forgotten them."""
    (q, k, v), keywords = build(case)
    want = exact(q, k, v, **keywords)
    assert forget(k, v, keywords) > 0
    out = paged_decode(q, k, v, **without(keywords, "starts_B1", "max_query"), block_l=16, splits=splits)
    assert error(out, want) < BOUND


@pytest.mark.parametrize("case", LEFT, ids=str)
def test_prefill_reads_nothing_that_left_a_window(case):
    (q, k, v), keywords = build(case)
    want = exact(q, k, v, **keywords)
    assert forget(k, v, keywords)
    out = paged_prefill(q, k, v, **without(keywords, "max_query", "max_len"), block_l=16, block_m=16)
    assert error(out, want) < BOUND


@pytest.mark.parametrize("case", BLOCKS, ids=str)
@pytest.mark.parametrize("rows", [16, 32])
def test_blocks_see_themselves_whole(case, rows):
    tensors, keywords = build(case)
    out = paged_prefill(*tensors, **without(keywords, "max_query", "max_len"), block_l=16, block_m=rows)
    assert error(out, exact(*tensors, **keywords)) < BOUND


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"chunk": 8}])
def test_prefill_of_whole_prompts_without_a_cache(options):
    case = Case([33, 1, 19], [33, 1, 19], options=options)
    (q, k, v), keywords = build(case)
    want = exact(q, k, v, **keywords)
    slots = [keywords["slot_table_RC"][row, :n] for row, n in zip(keywords["rows_B"], case.lens, strict=True)]
    k, v = (x[[int(s) for part in slots for s in part]] for x in (k, v))
    keywords["slot_table_RC"] = keywords["rows_B"] = None
    out = paged_prefill(q, k, v, **without(keywords, "max_query", "max_len"), block_l=16, block_m=16)
    assert error(out, want) < BOUND


def test_decodes_beside_a_prompt():
    """The first sequences go through the decode kernel, the others through the prefill kernel, into one result."""
    tensors, keywords = build(Case([1, 1, 1, 21, 1], [40, 3, 17, 30, 9]))
    out = launch_paged_attention(*tensors, num_decodes=3, **without(keywords, "max_query"))
    assert error(out, exact(*tensors, **keywords)) < BOUND


def test_sequences_that_begin_are_read_from_the_step(monkeypatch):
    """They need no slot table; those with a past or that decode do: each row is written by one launch."""
    monkeypatch.setattr("tracklayer.kernels.attention.use_triton", lambda x: True)
    case = Case([1, 7, 20, 3], [9, 7, 20, 12])
    (q, k, v), keywords = build(case)
    want = exact(q, k, v, **keywords)
    step_kv = tuple(step_rows(x, keywords) for x in (k, v))
    begins = np.array([False, True, True, False])
    lens = np.array(case.lens, np.int32)
    fresh = tuple(torch.from_numpy(np.where(mask, -1, lens).astype(np.int32)) for mask in (begins, ~begins))
    slots = [keywords["slot_table_RC"][keywords["rows_B"][b], : case.lens[b]].long() for b in (1, 2)]
    k[torch.cat(slots)] = v[torch.cat(slots)] = math.nan  # what begins here must not come from the cache
    out = paged_attention(q, k, v, num_decodes=1, step_kv=step_kv, fresh=fresh, **keywords)
    assert error(out, want) < BOUND


def step_rows(cache, keywords):
    """The step's own keys or values, out of the cache, in token order."""
    starts, lens = keywords["starts_B1"].tolist(), keywords["lens_B"].tolist()
    rows = []
    for b, (begin, end) in enumerate(pairwise(starts)):
        table = keywords["slot_table_RC"][keywords["rows_B"][b]].long()
        rows.append(cache[table[lens[b] - (end - begin) : lens[b]]])
    return torch.cat(rows)
