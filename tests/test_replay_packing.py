"""Routes laid out beside tokens: written-out small batches, and every wrong row named before a forward."""

from __future__ import annotations

import numpy as np
import pytest

from tracklayer.errors import UserError
from tracklayer.replay.packing import lay_out, packed_slots, padded_slots
from tracklayer.routes.record import Routes


def counted(tokens: int, base: int = 0, start: int = 0, layers: tuple[int, ...] = (1, 4)) -> Routes:
    """Row of position p at column c is [base + p, base + p + 1 + c]: a reader sees at once what lies where."""
    p = np.arange(start, start + tokens)[:, None]
    ids = np.stack([np.stack([base + p[:, 0], base + p[:, 0] + 1 + c], -1) for c in range(len(layers))], 1)
    return Routes(ids, layers, 100, start)


def first_ids(batch) -> list[int]:
    """First expert of every replayed slot at the first layer, -1 elsewhere."""
    return np.where(batch.replay_NL[:, 0], batch.ids_NLK[:, 0, 0].astype(int), -1).tolist()


A, B = counted(3), counted(1, base=50)  # sequences of 4 and 2 tokens without a row for the last


@pytest.mark.parametrize(
    ("mask", "ids"),
    [
        ([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], [0, 1, 2, -1, -1, 50, -1, -1, -1, -1]),
        ([[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]], [-1, 0, 1, 2, -1, -1, -1, -1, 50, -1]),
        ([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]], [-1, 0, 1, 2, -1, -1, 50, -1, -1, -1]),
    ],
)
def test_padding_right_left_and_both(mask: list[list[int]], ids: list[int]) -> None:
    batch = lay_out([A, B], padded_slots(mask))
    assert first_ids(batch) == ids
    assert batch.layer_ids == (1, 4) and batch.ids_NLK.dtype == np.uint8
    assert np.array_equal(batch.replay_NL[:, 0], batch.replay_NL[:, 1])


def test_packed_keeps_every_sample() -> None:
    """2 and 3 tokens give 5 slots, not 3."""
    batch = lay_out([counted(2), counted(3, base=50)], packed_slots([0, 2, 5], 6))
    assert first_ids(batch) == [0, 1, 50, 51, 52, -1]
    batch = lay_out([A, B], packed_slots([0, 6, 8], lengths=[4, 2]))
    assert first_ids(batch) == [0, 1, 2, -1, -1, -1, 50, -1]


def test_row_for_the_last_token_is_used_when_there_is_one() -> None:
    assert first_ids(lay_out([counted(4), B], packed_slots([0, 4, 6]))) == [0, 1, 2, 3, 50, -1]


@pytest.mark.parametrize(
    ("replay", "ids"),
    [
        ([slice(0, 2), slice(0, 0)], [0, 1, -1, -1, -1, -1]),  # prompt only
        ([slice(2, None), slice(1, None)], [-1, -1, 2, -1, -1, -1]),  # response only
        ([[True, False, True, False], None], [0, -1, 2, -1, 50, -1]),
    ],
)
def test_masks(replay: list, ids: list[int]) -> None:
    assert first_ids(lay_out([A, B], packed_slots([0, 4, 6]), replay=replay)) == ids


def test_samples_without_routes_and_late_starts() -> None:
    slots = packed_slots([0, 4, 6])
    assert first_ids(lay_out([None, B], slots)) == [-1, -1, -1, -1, 50, -1]
    late = counted(1, start=2)
    with pytest.raises(UserError, match=r"sample 0 token 0 layer 1 .* has no recorded row \(4 such rows\)"):
        lay_out([late, B], slots)
    assert first_ids(lay_out([late, B], slots, replay=[slice(2, None), None])) == [-1, -1, 2, -1, 50, -1]
    assert first_ids(lay_out([late, B], slots, on_missing="live")) == [-1, -1, 2, -1, 50, -1]


def test_a_gap_at_one_layer_is_named_or_left_to_the_live_router() -> None:
    ids = A.to(np.int32)
    ids[1, 1] = -1
    gap = Routes(ids, A.layer_ids, 100)
    with pytest.raises(UserError, match=r"sample 1 token 1 layer 4 \(row \[255, 255\]\) has no recorded row \(1 such"):
        lay_out([B, gap], packed_slots([0, 2, 6]))
    batch = lay_out([B, gap], packed_slots([0, 2, 6]), on_missing="live")
    assert batch.replay_NL[3].tolist() == [True, False]


@pytest.mark.parametrize(("row", "message"), [([7, 7], "has an expert twice"), ([7, 130], r"has an expert id outside")])
def test_rows_are_checked_again_here(row: list[int], message: str) -> None:
    base = A.to(np.uint8, missing=None)
    changed_later = Routes(base, A.layer_ids, 100)
    base[2, 1] = row
    with pytest.raises(UserError, match=rf"sample 1 token 2 layer 4 \(row \[{row[0]}, {row[1]}\]\) {message}"):
        lay_out([B, changed_later], packed_slots([0, 2, 6]))


@pytest.mark.parametrize("tokens", [1, 2, 5, 9])
def test_a_wrong_row_count_is_named(tokens: int) -> None:
    with pytest.raises(UserError, match=f"sample 1: routes end at position {tokens}, the sequence has 4 tokens"):
        lay_out([B, counted(tokens)], packed_slots([0, 2, 6]))


def test_truncated_sequences_are_allowed_when_said() -> None:
    batch = lay_out([counted(9)], packed_slots([0, 4]), truncated=True)
    assert first_ids(batch) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="routes end at position 2"):
        lay_out([counted(2)], packed_slots([0, 4]), truncated=True)


def test_one_model_one_count() -> None:
    slots = packed_slots([0, 4, 6])
    with pytest.raises(UserError, match=r"sample 1: layer_ids \(1, 5\), the first sample has \(1, 4\)"):
        lay_out([A, counted(1, layers=(1, 5))], slots)
    with pytest.raises(UserError, match="sample 1: num_experts 60"):
        lay_out([A, Routes(B.experts_TLK, B.layer_ids, 60)], slots)
    with pytest.raises(UserError, match="1 samples of routes for 2 sequences"):
        lay_out([A], slots)
    with pytest.raises(UserError, match="no sample of the batch has routes"):
        lay_out([None, None], slots)
    with pytest.raises(UserError, match=r"sample 0: replay mask of shape \[3\] for 4 tokens"):
        lay_out([A, B], slots, replay=[[True] * 3, None])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: padded_slots([[1, 0, 1]]), "sample 0: its tokens are not contiguous"),
        (lambda: padded_slots([[0, 1, 1], [1, 0, 1]]), "sample 1: its tokens"),
        (lambda: padded_slots([1, 1]), r"must be \[samples, tokens\]"),
        (lambda: packed_slots([1, 3]), "start at 0 and never fall"),
        (lambda: packed_slots([0, 3, 2]), "never fall"),
        (lambda: packed_slots([0, 3], 2), "2 slots can not hold 3"),
        (lambda: packed_slots([0, 3], lengths=[4]), r"lengths \[4\] do not fit the packed spans \[3\]"),
    ],
)
def test_wrong_layouts(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_parts_of_a_batch() -> None:
    batch = lay_out([A, B], packed_slots([0, 4, 6]))
    part = batch[np.array([5, 4, 0])]
    assert first_ids(part) == [-1, 50, 0] and part.slots.sample_N.tolist() == [1, 1, 0]
    stage = batch.layers(2, 9)
    assert stage.layer_ids == (4,) and np.array_equal(stage.ids_NLK, batch.ids_NLK[:, 1:])


def test_empty_rows_and_aborted_samples() -> None:
    empty = Routes(np.empty((0, 2, 2), int), (1, 4), 100)
    assert first_ids(lay_out([A, empty], packed_slots([0, 4, 5]))) == [0, 1, 2, -1, -1]  # one token, never fed
    assert first_ids(lay_out([A, empty], padded_slots([[1] * 4, [0] * 4]))) == [0, 1, 2, -1, -1, -1, -1, -1]


def test_layers_that_choose_different_numbers_are_refused_by_name() -> None:
    routes = Routes(np.array([[[1, 2], [3, -1]]]), (1, 4), 8, layer_top_k=(2, 1))
    with pytest.raises(UserError, match=r"layers choose \[2, 1\] experts.*not replayed"):
        lay_out([routes], packed_slots([0, 2]))
