"""Megatron's splits against cases written out by hand: what each rank's routers see, in their order."""

from __future__ import annotations

import numpy as np
import pytest

from tracklayer.errors import UserError
from tracklayer.replay.megatron import (
    Rank,
    packed_rank_index,
    padded_rank_index,
    rank_arrays,
    router_arrays,
    stage_layers,
    zigzag,
)
from tracklayer.replay.packing import lay_out, packed_slots, padded_slots
from tracklayer.routes.record import Routes


def counted(tokens: int, base: int = 0, layers: tuple[int, ...] = (1, 2, 3)) -> Routes:
    """Experts of position p at layer l: [base + p, 90 + l]."""
    rows = [[[base + p, 90 + layer] for layer in layers] for p in range(tokens)]
    return Routes(np.array(rows).reshape(tokens, len(layers), 2), layers, 100)


def test_zigzag_by_hand() -> None:
    assert zigzag(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert zigzag(12, 3, 1).tolist() == [2, 3, 8, 9]
    assert zigzag(5, 1, 0).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="a multiple of 4 tokens, got 6"):
        zigzag(6, 2, 0)


# two samples of 8 positions; index i of the flattened batch is sample i // 8, position i % 8
PADDED = [
    (Rank(), [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]),  # [S, B]: position by position
    (Rank(tp_size=2, tp_rank=1), [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]),  # without sequence parallel
    (Rank(tp_size=2, tp_rank=0, sequence_parallel=True), [0, 8, 1, 9, 2, 10, 3, 11]),
    (Rank(tp_size=2, tp_rank=1, sequence_parallel=True), [4, 12, 5, 13, 6, 14, 7, 15]),
    (Rank(cp_size=2, cp_rank=0), [0, 8, 1, 9, 6, 14, 7, 15]),
    (Rank(cp_size=2, cp_rank=1), [2, 10, 3, 11, 4, 12, 5, 13]),
    (Rank(cp_size=2, cp_rank=0, tp_size=2, tp_rank=1, sequence_parallel=True), [6, 14, 7, 15]),
    (Rank(cp_size=2, cp_rank=1, tp_size=2, tp_rank=0, sequence_parallel=True), [2, 10, 3, 11]),
]


@pytest.mark.parametrize(("rank", "index"), PADDED)
def test_padded_index_by_hand(rank: Rank, index: list[int]) -> None:
    assert padded_rank_index(2, 8, rank).tolist() == index


# packed sequences of 4 and 8 slots
PACKED = [
    (Rank(), list(range(12))),
    (Rank(cp_size=2, cp_rank=0), [0, 3, 4, 5, 10, 11]),
    (Rank(cp_size=2, cp_rank=1), [1, 2, 6, 7, 8, 9]),
    (Rank(cp_size=2, cp_rank=1, tp_size=3, tp_rank=1, sequence_parallel=True), [6, 7]),
    (Rank(tp_size=4, tp_rank=3, sequence_parallel=True), [9, 10, 11]),
]


@pytest.mark.parametrize(("rank", "index"), PACKED)
def test_packed_index_by_hand(rank: Rank, index: list[int]) -> None:
    assert packed_rank_index([0, 4, 12], rank).tolist() == index


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_together_see_every_token_once(cp: int, tp: int) -> None:
    ranks = [
        Rank(cp_size=cp, cp_rank=c, tp_size=tp, tp_rank=t, sequence_parallel=True) for c in range(cp) for t in range(tp)
    ]
    padded = np.concatenate([padded_rank_index(3, 24, rank) for rank in ranks])
    assert np.array_equal(np.sort(padded), np.arange(72))
    packed = np.concatenate([packed_rank_index([0, 24, 24, 72], rank) for rank in ranks])
    assert np.array_equal(np.sort(packed), np.arange(72))


STAGES = [
    (8, Rank(pp_size=2, pp_rank=0), None, [[0, 1, 2, 3]]),
    (8, Rank(pp_size=2, pp_rank=1), None, [[4, 5, 6, 7]]),
    (8, Rank(pp_size=2, pp_rank=0, vp_size=2), None, [[0, 1], [4, 5]]),
    (8, Rank(pp_size=2, pp_rank=1, vp_size=2), None, [[2, 3], [6, 7]]),
    (12, Rank(pp_size=2, pp_rank=1, vp_size=3), None, [[2, 3], [6, 7], [10, 11]]),
    (7, Rank(pp_size=2, pp_rank=0), [3, 4], [[0, 1, 2]]),
    (7, Rank(pp_size=2, pp_rank=1, vp_size=2), [1, 2, 2, 2], [[1, 2], [5, 6]]),
    (3, Rank(pp_size=2, pp_rank=1), [3, 0], [[]]),
]


@pytest.mark.parametrize(("num_layers", "rank", "sizes", "layers"), STAGES)
def test_stage_layers_by_hand(num_layers: int, rank: Rank, sizes: list[int] | None, layers: list[list[int]]) -> None:
    assert [list(chunk) for chunk in stage_layers(num_layers, rank, sizes)] == layers


def test_one_rank_of_everything() -> None:
    """pp 2 x vp 2 over layers 0..3 (0 is dense), cp 2, sequence parallel 2; samples of 8 and 5 tokens, padded right."""
    samples = [counted(7), counted(4, base=40)]
    slots = padded_slots([[1] * 8, [1] * 5 + [0] * 3])
    rank = Rank(pp_size=2, pp_rank=1, vp_size=2, cp_size=2, cp_rank=0, tp_size=2, tp_rank=1, sequence_parallel=True)
    index = padded_rank_index(2, 8, rank)  # positions 6, 7 of both samples: 6/0, 6/1, 7/0, 7/1
    chunks = rank_arrays(samples, slots, index, rank, 4)
    assert [list(chunk) for chunk in chunks] == [[2], [4]]  # Megatron counts layers from 1
    assert chunks[0][2].dtype == np.int64
    # token 6 of sample 0 has a row; its last token and sample 1's padding have running fill ids
    assert chunks[0][2].tolist() == [[6, 91], [2, 3], [4, 5], [6, 7]]
    assert chunks[1][4].tolist() == [[6, 93], [2, 3], [4, 5], [6, 7]]
    other = Rank(pp_size=2, pp_rank=0, vp_size=2)
    chunks = rank_arrays(samples, slots, padded_rank_index(2, 8, other), other, 4)
    assert [list(chunk) for chunk in chunks] == [[], [3]]
    assert chunks[1][3][:4].tolist() == [[0, 92], [40, 92], [1, 92], [41, 92]]


def test_packed_rank() -> None:
    """Sequences of 3 and 7 tokens in spans of 4 and 8."""
    samples = [counted(2), counted(6, base=40)]
    slots = packed_slots([0, 4, 12], lengths=[3, 7])
    rank = Rank(cp_size=2, cp_rank=1)
    chunks = rank_arrays(
        samples, slots, packed_rank_index([0, 4, 12], rank), rank, 4, unreplayed="missing", dtype="int16"
    )
    assert chunks[0][2].tolist() == [[1, 91], [-1, -1], [42, 91], [43, 91], [44, 91], [45, 91]]
    assert chunks[0][2].dtype == np.int16


def test_fills_are_valid_routes() -> None:
    batch = lay_out([counted(2), None], packed_slots([0, 3, 7]))
    for how in ("running", "first"):
        ids = router_arrays(batch, [range(4)], unreplayed=how)[0][2]
        assert ids.min() >= 0 and ids.max() < 100 and (ids[:, 0] != ids[:, 1]).all()
    running = router_arrays(batch, [range(4)])[0][2]
    assert len({tuple(row) for row in running[2:].tolist()}) == 5  # spread, not one pair of experts for all


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rank(cp_size=2, cp_rank=2), "cp_rank 2 is not one of 2 ranks"),
        (lambda: Rank(vp_size=0), "vp_size must be 1 or more"),
        (lambda: padded_rank_index(1, 10, Rank(cp_size=2)), "a multiple of 4 tokens, got 10"),
        (lambda: padded_rank_index(1, 9, Rank(tp_size=2, sequence_parallel=True)), "can not split 9 positions"),
        (lambda: packed_rank_index([0, 4, 10], Rank(cp_size=2)), "a multiple of 4 tokens, got 6"),
        (lambda: stage_layers(7, Rank(pp_size=2)), "7 layers do not split into 2 equal blocks"),
        (lambda: stage_layers(7, Rank(pp_size=2), [3, 3]), r"block sizes \[3, 3\] are not 2 parts of 7"),
    ],
)
def test_wrong_splits(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_wrong_rows_are_named() -> None:
    slots, rank = packed_slots([0, 4]), Rank()
    index = packed_rank_index([0, 4], rank)
    with pytest.raises(UserError, match=r"routes have layers \[3\], the decoder has 3: MTP .* routes.layers\(0, 3\)"):
        rank_arrays([counted(3)], slots, index, rank, 3)
    assert [list(c) for c in rank_arrays([counted(3).layers(0, 3)], slots, index, rank, 3)] == [[2, 3]]
    holed = counted(3).to(np.int32)
    holed[1, 2] = -1
    hole = Routes(holed, (1, 2, 3), 100)
    with pytest.raises(UserError, match="sample 0 token 1 layer 3"):
        rank_arrays([hole], slots, index, rank, 4)
    with pytest.raises(UserError, match='needs unreplayed="missing"'):
        rank_arrays([hole], slots, index, rank, 4, on_missing="live")
    live = rank_arrays([hole], slots, index, rank, 4, on_missing="live", unreplayed="missing")
    assert live[0][4].tolist() == [[0, 93], [-1, -1], [2, 93], [-1, -1]]
    with pytest.raises(UserError, match="unreplayed must be"):
        router_arrays(lay_out([counted(3)], slots), [range(4)], unreplayed="zeros")
