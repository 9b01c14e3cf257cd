"""Paged attention's torch reference against a float64 loop."""

from __future__ import annotations

import pytest
import torch
from attention_cases import BLOCKS, DECODE, LEFT, MIXED, Case, build, error, exact, forget

from tracklayer.kernels.attention import paged_attention


@pytest.mark.parametrize("case", DECODE + MIXED + BLOCKS, ids=str)
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_agrees_with_float64(case, dtype, bound):
    tensors, keywords = build(case, dtype)
    want = exact(*tensors, **keywords)
    assert error(paged_attention(*tensors, **keywords), want) < bound


@pytest.mark.parametrize("case", LEFT, ids=str)
def test_nothing_that_left_is_read(case):
    """Slots outside every window or chunk may hold anything, and the table may have forgotten them."""
    (q, k, v), keywords = build(case)
    want = exact(q, k, v, **keywords)
    assert forget(k, v, keywords) > 0
    assert error(paged_attention(q, k, v, **keywords), want) < 1e-5


def test_one_by_one_equals_batched():
    tensors, keywords = build(MIXED[0])
    together = paged_attention(*tensors, **keywords)
    q, k, v = tensors
    for b, (begin, end) in enumerate(zip(keywords["starts_B1"], keywords["starts_B1"][1:], strict=False)):
        alone = {**keywords, "rows_B": keywords["rows_B"][b : b + 1], "lens_B": keywords["lens_B"][b : b + 1]}
        alone["starts_B1"] = torch.tensor([0, end - begin], dtype=torch.int32)
        torch.testing.assert_close(paged_attention(q[begin:end], k, v, **alone), together[begin:end])


def test_chunked_equals_whole():
    """The last 5 tokens of a prompt of 23 give the same rows whether the others are cached or in the step."""
    (q, k, v), keywords = build(Case([23], [23]))
    whole = paged_attention(q, k, v, **keywords)
    tail = {**keywords, "starts_B1": torch.tensor([0, 5], dtype=torch.int32)}
    torch.testing.assert_close(paged_attention(q[-5:], k, v, **tail), whole[-5:])


def test_empty_step():
    (q, k, v), keywords = build(Case([1], [3]))
    none = {**keywords, "rows_B": keywords["rows_B"][:0], "lens_B": keywords["lens_B"][:0]}
    none["starts_B1"] = keywords["starts_B1"][:1]
    assert paged_attention(q[:0], k, v, **none).shape == (0, 4, 32)


def test_refuses_heads_that_do_not_fit():
    (q, k, v), keywords = build(Case([1], [3]))
    with pytest.raises(ValueError, match="3 query heads do not share 2 key"):
        paged_attention(q[:, :3], k, v, **keywords)
    with pytest.raises(ValueError, match="query width 16 differs from key width 32"):
        paged_attention(q[..., :16], k, v, **keywords)
