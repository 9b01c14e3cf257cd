"""The route pool: narrow types, sentinels, and rows that were never written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tracklayer.errors import IncompleteRoutes
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.pool import RoutePool

CPU = torch.device("cpu")


def pool(num_experts: int, top_k: int = 2, layers: tuple[int, ...] = (1, 4, 6), slots: int = 20) -> RoutePool:
    return RoutePool(slots, RouteShape(layer_ids=layers, top_k=top_k, num_experts=num_experts), CPU)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "dtype", "sentinel"),
    [
        (8, 2, torch.uint8, 255),
        (255, 1, torch.uint8, 255),
        (256, 2, torch.uint8, 255),
        (256, 1, torch.int16, -1),
        (257, 8, torch.int16, -1),
        (768, 12, torch.int16, -1),
    ],
)
def test_narrowest_type_with_room_for_the_sentinel(num_experts, top_k, dtype, sentinel):
    made = pool(num_experts, top_k)
    assert made.tensor_SLK.dtype == dtype and made.sentinel == sentinel
    assert (made.tensor_SLK == sentinel).all(), "a new pool holds no row"
    assert made.shape.bytes_per_token == 3 * top_k * dtype.itemsize


def test_gather_of_several_requests():
    made = pool(200)
    made.tensor_SLK[:] = torch.arange(20 * 3 * 2, dtype=torch.uint8).reshape(20, 3, 2)
    first, second = np.array([3, 2, 9], np.int32), np.array([19], np.int32)
    rows = made.gather([first, second, np.empty(0, np.int32)], [0, 7, 0]).land()
    np.testing.assert_array_equal(rows[0], made.tensor_SLK.numpy()[first])
    np.testing.assert_array_equal(rows[1], made.tensor_SLK.numpy()[second])
    assert len(rows[2]) == 0


def test_a_row_that_was_never_written_is_an_error_that_says_where():
    made = pool(8)
    made.tensor_SLK[:] = 3
    made.tensor_SLK[5, 1] = 255
    made.tensor_SLK[6] = 255
    slots = [np.array(s, np.int32) for s in ([4, 5], [7], [8, 6])]
    first, whole, last = made.gather(slots, [10, 3, 20]).land()
    assert isinstance(first, IncompleteRoutes) and "1 route row" in str(first) and "token 11 layer 4" in str(first)
    assert isinstance(last, IncompleteRoutes) and last.positions == [21] * 3 and last.layers == [1, 4, 6]
    np.testing.assert_array_equal(whole, np.full((1, 3, 2), 3))  # its neighbours' faults are not its own


def test_fill_marks_only_its_slots():
    made = pool(8)
    made.tensor_SLK[:] = 3
    made.fill(torch.tensor([2, 2, 0], dtype=torch.int32))
    unwritten = (made.tensor_SLK == 255).all(-1).all(-1)
    assert unwritten.nonzero().flatten().tolist() == [0, 2]


def test_id_255_of_256_experts_is_no_missing_row():
    made = pool(256)
    made.tensor_SLK[:] = torch.tensor([255, 254], dtype=torch.uint8)
    (rows,) = made.gather([np.arange(20, dtype=np.int32)], [0]).land()
    assert (rows == [255, 254]).all()
