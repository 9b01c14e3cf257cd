"""Routes: what is refused, what is missing, slicing without copies, joining turns."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tracklayer.errors import IncompleteRoutes, UserError
from tracklayer.routes.ids import fill_value, narrow_dtype
from tracklayer.routes.record import Routes, concat

KEPT = [
    (2, 2, np.uint8),
    (255, 8, np.uint8),
    (256, 8, np.uint8),
    (256, 1, np.int16),
    (257, 8, np.int16),
    (768, 12, np.int16),
    (1 << 15, 2, np.int16),
    ((1 << 15) + 1, 2, np.int32),
    (70_000, 2, np.int32),
]


def _holds(source: type, experts: int, top_k: int) -> bool:
    """The source type has room for every id, and with one id a row for a fill value of its own."""
    room = np.iinfo(source).max
    return experts - 1 < room or (experts - 1 == room and (top_k > 1 or np.issubdtype(source, np.signedinteger)))


SOURCES = (np.uint8, np.int16, np.uint16, np.int32, np.int64)
WIRE = [(*kept, source) for kept in KEPT for source in SOURCES if _holds(source, kept[0], kept[1])]


def random_ids(tokens: int, layers: int, top_k: int, experts: int, seed: int = 0) -> np.ndarray:
    """Distinct ids, the largest and the smallest among them."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.choice(experts, top_k, replace=False) for _ in range(tokens * layers)])
    if len(ids):
        ids[-1] = np.sort(np.append(rng.choice(experts - 1, top_k - 1, replace=False), experts - 1))
        ids[0] = (ids[0] - ids[0].min()) % experts
    return ids.reshape(tokens, layers, top_k)


def routes(tokens: int = 7, layers: int = 3, top_k: int = 2, experts: int = 8, start: int = 0, seed: int = 0) -> Routes:
    return Routes(random_ids(tokens, layers, top_k, experts, seed), range(1, layers + 1), experts, start)


@pytest.mark.parametrize(("experts", "top_k", "dtype", "source"), WIRE)
def test_kept_narrow_and_whole(experts: int, top_k: int, dtype: type, source: type) -> None:
    assert narrow_dtype(experts, top_k) == dtype
    ids = random_ids(11, 3, top_k, experts)
    kept = Routes(ids.astype(source), range(3), experts)
    assert kept.dtype == dtype and kept.complete
    assert np.array_equal(kept.experts_TLK, ids)
    assert np.array_equal(kept.to(np.int64), ids)


@pytest.mark.parametrize(("experts", "top_k", "dtype", "source"), WIRE)
def test_missing_rows_are_explicit(experts: int, top_k: int, dtype: type, source: type) -> None:
    ids = random_ids(5, 4, top_k, experts).astype(source)
    ids[3, 2] = fill_value(source)
    kept = Routes(ids, (0, 2, 5, 7), experts, start=10)
    assert np.argwhere(kept.missing_TL).tolist() == [[3, 2]] and not kept.complete
    assert (kept.experts_TLK[3, 2] == fill_value(dtype)).all()
    assert (kept.to(np.int32)[3, 2] == -1).all()
    assert (kept.to(np.int32)[4] == ids[4]).all()
    with pytest.raises(IncompleteRoutes, match="token 13 layer 5") as caught:
        kept.require_complete()
    assert (caught.value.positions, caught.value.layers) == ([13], [5])
    assert "1 of 20 rows MISSING" in repr(kept)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("experts", [8, 255, 256, 300])
def test_layers_that_choose_different_numbers(experts: int, source: type) -> None:
    """Kept with a fill that is no id; slices narrow with their layers; what an unused place may hold is the fill."""
    fill, room = fill_value(source), np.iinfo(source).max
    ids = random_ids(6, 3, 3, experts).astype(np.int64)
    used = np.arange(3) < np.array([[2], [3], [1]])
    ids = np.where(used, ids, fill)
    if experts > room:
        return
    given = ids.astype(source)
    if experts == 256 and source is np.uint8:
        with pytest.raises(UserError, match=r"top_k \(2, 3, 1\), 255 in uint8 can be expert 255 or an unused place"):
            Routes(given, range(3), experts, layer_top_k=(2, 3, 1))
        return
    kept = Routes(given, range(3), experts, start=4, layer_top_k=[2, 3, 1])
    assert kept.dtype == (np.uint8 if experts < 256 else np.int16) and kept.complete and kept.top_k == 3
    assert np.array_equal(kept.experts_TLK == fill_value(kept.dtype), np.broadcast_to(~used, kept.shape))
    assert np.array_equal(kept.used_LK, used) and kept.top_k_L.tolist() == [2, 3, 1]
    assert np.array_equal(kept.to(np.int32), np.where(used, ids, -1))
    assert kept.tokens(6).layer_top_k == (2, 3, 1) and "top 1..3 of" in repr(kept)
    assert (last := kept.layers(2, 3)).layer_top_k is None and last.top_k == 1
    assert np.array_equal(last.to(np.int32)[:, 0, 0], ids[:, 2, 0])
    assert kept.layers(0, 2).layer_top_k == (2, 3)
    assert kept.tokens(4, 7).append(kept.tokens(6)) == kept
    spoiled = kept.to(np.int32)
    spoiled[3, 2, 2] = 1
    with pytest.raises(UserError, match=r"token 7 layer 2 chooses 1 experts, the places after them must hold -1"):
        Routes(spoiled, range(3), experts, start=4, layer_top_k=(2, 3, 1))
    spoiled = kept.to(np.int32)
    spoiled[3, 0, 1] = spoiled[3, 0, 0]
    with pytest.raises(UserError, match="must differ"):
        Routes(spoiled, range(3), experts, layer_top_k=(2, 3, 1))
    spoiled[3, 0, 1] = -1
    with pytest.raises(UserError, match="missing as a whole only"):
        Routes(spoiled, range(3), experts, layer_top_k=(2, 3, 1))
    spoiled[3, 0] = -1
    assert np.argwhere(Routes(spoiled, range(3), experts, layer_top_k=(2, 3, 1)).missing_TL).tolist() == [[3, 0]]
    with pytest.raises(UserError, match="layer_top_k"):
        kept.append(Routes(np.zeros((0, 3, 3), np.int16), range(3), experts, start=10))


def test_numbers_of_choices_that_can_not_be() -> None:
    ids = random_ids(2, 3, 2, 8)
    assert Routes(ids, range(3), 8, layer_top_k=(2, 2, 2)) == Routes(ids, range(3), 8)
    for wrong in [(2, 2), (1, 1, 1), (2, 3, 1), (2, 0, 1), ()]:
        with pytest.raises(UserError, match="one number for each of 3 layers"):
            Routes(ids, range(3), 8, layer_top_k=wrong)


def test_one_expert_of_256_in_a_byte_has_two_readings() -> None:
    ids = np.full((3, 1, 1), 255, np.uint8)
    with pytest.raises(UserError, match="with top_k 1, 255 in uint8 can be expert 255 or a missing row"):
        Routes(ids, (0,), 256)
    assert Routes(ids.astype(np.int16), (0,), 256).complete
    assert not Routes(ids, (0,), 255).complete


def test_zeros_are_not_missing_but_wrong() -> None:
    ids = random_ids(4, 3, 2, 8)
    ids[2, 1] = 0
    with pytest.raises(UserError, match=r"token 7 layer 2: the 2 experts must differ, got \[0, 0\]; an all-zero row"):
        Routes(ids, (1, 2, 3), 8, start=5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
@pytest.mark.parametrize("bad", [8, 9, 254])
def test_id_out_of_range(dtype: type, bad: int) -> None:
    ids = random_ids(6, 3, 2, 8).astype(dtype)
    ids[4, 2, 1] = bad
    with pytest.raises(UserError, match=rf"token 4 layer 3: expert id {bad} is not in 0\.\.7 .*shared experts"):
        Routes(ids, (1, 2, 3), 8)


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_negative_and_half_missing_rows(dtype: type) -> None:
    ids = random_ids(6, 3, 2, 300).astype(dtype)
    ids[1, 0, 1] = -1
    with pytest.raises(UserError, match=r"token 1 layer 1: expert id -1 .*missing as a whole only"):
        Routes(ids, (1, 2, 3), 300)
    ids[1, 0, 1] = -7
    with pytest.raises(UserError, match="expert id -7"):
        Routes(ids, (1, 2, 3), 300)


def test_id_that_would_wrap_in_the_narrow_type_is_caught() -> None:
    ids = random_ids(4, 2, 2, 128).astype(np.int32)
    ids[3, 1, 0] = 256 + 5
    with pytest.raises(UserError, match="token 3 layer 1: expert id 261"):
        Routes(ids, (0, 1), 128)
    with pytest.raises(UserError, match="expert id 261"):  # also where the content is trusted: a cast would lose it
        Routes(ids, (0, 1), 128, check=False)


@pytest.mark.parametrize("top_k", [2, 3, 8])
def test_a_duplicate_is_found_wherever_it_is(top_k: int) -> None:
    clean = random_ids(40_000 // top_k, 3, top_k, 40, seed=1)
    Routes(clean, (0, 1, 2), 40)
    for t, layer, j, k in [(0, 0, 0, top_k - 1), (len(clean) - 1, 2, top_k - 2, top_k - 1), (len(clean) // 2, 1, 0, 1)]:
        ids = clean.copy()
        ids[t, layer, k] = ids[t, layer, j]
        with pytest.raises(UserError, match=f"token {t} layer {layer}: the {top_k} experts must differ"):
            Routes(ids, (0, 1, 2), 40)


@pytest.mark.parametrize(
    ("ids", "layer_ids", "experts", "message"),
    [
        (np.zeros((2, 3)), (0, 1, 2), 8, r"integer array \[tokens, layers, top_k\], got float64"),
        (np.zeros((2, 3, 2)), (0, 1, 2), 8, "float64"),
        (np.zeros((2, 3, 2), bool), (0, 1, 2), 8, "bool"),
        (np.zeros((0, 3, 2), int), (0, 1), 8, "3 layer columns but 2 layer ids"),
        (np.zeros((0, 0, 2), int), (), 8, "0 layer columns"),
        (np.zeros((0, 2, 2), int), (1, 1), 8, r"must ascend.*\[1, 1\]"),
        (np.zeros((0, 2, 2), int), (-1, 1), 8, "must ascend"),
        (np.zeros((0, 2, 9), int), (0, 1), 8, "9 distinct experts per token can not be chosen from 8"),
        (np.zeros((0, 2, 0), int), (0, 1), 8, "0 distinct experts"),
    ],
)
def test_wrong_shapes(ids: np.ndarray, layer_ids: tuple[int, ...], experts: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Routes(ids, layer_ids, experts)
    with pytest.raises(UserError, match="start must be 0 or more"):
        Routes(np.zeros((0, 1, 1), int), (0,), 2, start=-1)


def test_slices_share_memory_and_nothing_can_be_written() -> None:
    whole = routes(9, 4, start=3)
    part = whole.tokens(5, 8)
    assert (part.start, part.stop, len(part)) == (5, 8, 3)
    assert np.shares_memory(part.experts_TLK, whole.experts_TLK)
    assert np.array_equal(part.experts_TLK, whole.experts_TLK[2:5])
    stage = whole.layers(2, 4)
    assert stage.layer_ids == (2, 3) and np.shares_memory(stage.experts_TLK, whole.experts_TLK)
    assert np.array_equal(stage.experts_TLK, whole.experts_TLK[:, 1:3])
    assert whole.tokens(12).shape == (0, 4, 2) and whole.tokens(3) == whole
    for frozen in (whole, part, stage):
        with pytest.raises(ValueError, match="read-only"):
            frozen.experts_TLK[0, 0, 0] = 1
    with pytest.raises(UserError, match=r"positions 2\.\.8 do not lie in the routes' 3\.\.12"):
        whole.tokens(2, 8)
    with pytest.raises(UserError, match=r"no MoE layer in 7..9"):
        whole.layers(7, 9)


def test_narrow_arrays_are_not_copied() -> None:
    ids = random_ids(5, 2, 2, 8).astype(np.uint8)
    assert np.shares_memory(Routes(ids, (0, 1), 8).experts_TLK, ids)
    assert ids.flags.writeable  # only the view is frozen


def test_equality_and_printing() -> None:
    a = routes(6)
    assert a == Routes(a.experts_TLK.astype(np.int32), a.layer_ids, 8)
    assert a != routes(6, seed=1) and a != routes(6, start=1) and a != "routes"
    assert a != Routes(a.experts_TLK, (0, 2, 3), 8) and a != Routes(a.experts_TLK, a.layer_ids, 9)
    assert repr(a) == "Routes(tokens 0..6, 3 layers [1..3], top 2 of 8 experts, uint8, complete, 36 bytes)"
    assert "[0, 2, 4..6]" in repr(Routes(random_ids(1, 5, 2, 8), (0, 2, 4, 5, 6), 8))


# joining: the boundary row, offsets, replies that cover more than was asked


def test_second_turn_brings_the_boundary_row() -> None:
    """Turn 1: 4 prompt + 3 output tokens give rows 0..5; the token at 6 is first fed in turn 2."""
    truth = routes(12)
    turn1 = truth.tokens(0, 6)
    whole_again, only_new, overlapping = truth, truth.tokens(6), truth.tokens(4)
    for turn2 in (whole_again, only_new, overlapping):
        joined = concat([turn1, turn2])
        assert joined == truth and joined.complete
    assert np.array_equal(joined.experts_TLK[6], truth.experts_TLK[6])


def test_a_missing_row_takes_the_other_side() -> None:
    truth = routes(10)
    holes = truth.to(np.int32)
    holes[5, 1], holes[6] = -1, -1
    earlier = Routes(holes[:7], truth.layer_ids, 8)
    assert earlier.append(truth.tokens(5)) == truth
    assert truth.tokens(0, 7).append(Routes(holes[5:], truth.layer_ids, 8, start=5)) == truth


def test_overlap_must_agree() -> None:
    truth = routes(10)
    changed = truth.to(np.int32)
    changed[4, 2] = (changed[4, 2] + 1) % 8
    later = Routes(changed[3:], truth.layer_ids, 8, start=3)
    with pytest.raises(UserError, match="1 rows that both parts hold differ, first at token 4 layer 3"):
        truth.append(later)
    assert truth.append(later, prefer="earlier") == truth
    assert np.array_equal(truth.append(later, prefer="later").experts_TLK, changed)
    swapped = Routes(truth.experts_TLK[..., ::-1], truth.layer_ids, 8)
    assert truth.append(swapped) == truth  # the same experts in another order agree


def test_gaps_and_strangers_are_refused() -> None:
    truth = routes(10)
    with pytest.raises(UserError, match=r"rows from position 7 can not follow rows 0\.\.5.*5\.\.7"):
        truth.tokens(0, 5).append(truth.tokens(7))
    with pytest.raises(UserError, match="can not follow"):
        truth.tokens(5).append(truth.tokens(0, 5))
    with pytest.raises(UserError, match="first part starts at position 3: its earlier rows are needed"):
        concat([truth.tokens(3)])
    with pytest.raises(UserError, match="no routes to join"):
        concat([])
    with pytest.raises(UserError, match=r"different models.*num_experts 8 and 9"):
        truth.append(Routes(truth.experts_TLK, truth.layer_ids, 9))
    with pytest.raises(UserError, match="layer_ids"):
        truth.append(truth.layers(1, 3))


def test_any_way_to_cut_joins_again() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        truth = routes(int(rng.integers(1, 12)), seed=int(rng.integers(99)))
        cuts = np.sort(rng.integers(0, len(truth) + 1, int(rng.integers(1, 5))))
        parts = [truth.tokens(0, int(cuts[0]))]
        for cut in [*cuts[1:].tolist(), len(truth)]:
            parts.append(truth.tokens(int(rng.integers(0, parts[-1].stop + 1)), max(cut, parts[-1].stop)))
        assert concat(parts) == truth


BARE = """
import importlib.abc, sys
class OnlyNumpy(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "tracklayer"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, OnlyNumpy())
import tracklayer.routes.record, tracklayer.routes.codec, tracklayer.routes.forms, tracklayer.routes.store
import tracklayer.routes.replies, tracklayer.replay.packing, tracklayer.replay.metrics, tracklayer.replay.megatron
from tracklayer.routes.record import Routes
from tracklayer.routes.codec import decode, encode_sglang
routes = Routes([[[1, 2]], [[0, 3]]], [1], 4)
assert encode_sglang(routes, 2) == "AAAAAAAAAAABAAAAAgAAAAAAAAAAAAAAAAAAAAMAAAA="
print("read", routes)
"""


def test_reads_routes_with_numpy_alone() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "read Routes(" in done.stdout
