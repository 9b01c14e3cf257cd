"""Rows of the pool and small products: torch references against plain loops."""

from __future__ import annotations

import pytest
import torch

from tracklayer.kernels.linear import linear, linear_small
from tracklayer.kernels.rows import copy_slots, fill_rows, gather_rows


@pytest.mark.parametrize("dtype,fill", [(torch.uint8, 255), (torch.int16, -1)])
def test_fill_then_gather_counts_what_is_missing(dtype, fill):
    pool = torch.arange(10 * 3 * 2).reshape(10, 3, 2).to(dtype)
    slots = torch.tensor([4, 9, 4, 0], dtype=torch.int32)
    fill_rows(pool, slots[:1], fill)
    pool[9, 1, 0] = fill  # one of two ids: written all the same
    rows, missing = gather_rows(pool, slots, fill)
    assert rows.dtype == dtype and missing.dtype == torch.int32
    assert missing.tolist() == [2, 2, 2]  # slot 4 is asked for twice
    for row, slot in zip(rows, slots.tolist(), strict=True):
        assert row.equal(pool[slot])
    out = torch.empty_like(rows)
    assert gather_rows(pool, slots, fill, out)[0].data_ptr() == out.data_ptr() and out.equal(rows)
    rows, missing = gather_rows(pool, slots[:0], fill)
    assert rows.shape == (0, 3, 2) and missing.tolist() == [0, 0, 0]


def test_copy_slots_reads_before_it_writes():
    tensors = [torch.arange(6.0).reshape(6, 1), torch.arange(12).reshape(6, 2).to(torch.uint8)]
    copy_slots(tensors, torch.tensor([[1, 2], [2, 3]], dtype=torch.int32))
    assert tensors[0].flatten().tolist() == [0, 1, 1, 2, 4, 5]
    assert tensors[1].tolist() == [[0, 1], [2, 3], [2, 3], [4, 5], [8, 9], [10, 11]]


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
def test_linear(tokens):
    x, w, b = torch.randn(tokens, 24), torch.randn(7, 24), torch.randn(7)
    want = (x.double()[:, None] * w.double()[None]).sum(-1) + b.double()
    torch.testing.assert_close(linear(x, w, b).double(), want, rtol=1e-5, atol=1e-5)
    if tokens <= 2:
        torch.testing.assert_close(linear_small(x, w, b).double(), want, rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(ValueError, match="at most 2 tokens, got 5"):
            linear_small(x, w, b)
