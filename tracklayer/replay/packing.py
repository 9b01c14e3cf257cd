"""Where each token of a training batch lies, and the routes laid out beside it. numpy only.

N token slots of one forward, flattened as the model flattens them; L MoE layers; K chosen; B samples.

One rule for all layouts: two integer arrays say which sample and which position of it each slot holds (`Slots`).
Right and left padding, packing, and every split of them are made on these, and routes follow them (`lay_out`): rows can
not be padded by another rule than tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tracklayer.errors import UserError
from tracklayer.routes.ids import Array, fill_value, narrow_dtype
from tracklayer.routes.record import Routes

PADDING = -1


@dataclass(frozen=True, slots=True)
class Slots:
    """Which token each slot of a forward holds.

    sample_N    int32: index of the sample, -1 in padding
    position_N  int32: position in that sample's sequence
    length_B    int32: tokens of each whole sequence
    """

    sample_N: Array
    position_N: Array
    length_B: Array

    def __len__(self) -> int:
        return len(self.sample_N)

    def __getitem__(self, index: Any) -> Slots:
        """The slots at a slice or index array: the part of one rank."""
        return Slots(self.sample_N[index], self.position_N[index], self.length_B)


def padded_slots(attention_mask: npt.ArrayLike) -> Slots:
    """Slots of a padded batch from its mask [B, S] (1 = a token); padding may lie left, right, or on both sides."""
    mask_BS = np.asarray(attention_mask).astype(bool)
    if mask_BS.ndim != 2:
        raise UserError(f"attention_mask must be [samples, tokens], got shape {list(mask_BS.shape)}")
    holes_B = (np.diff(mask_BS.astype(np.int8), axis=1) == 1).sum(1) + mask_BS[:, 0]
    if (holes_B > 1).any():
        raise UserError(f"sample {int(np.argmax(holes_B > 1))}: its tokens are not contiguous in attention_mask")
    position_BS = np.cumsum(mask_BS, 1) - 1
    sample_BS = np.broadcast_to(np.arange(len(mask_BS))[:, None], mask_BS.shape)
    return Slots(
        np.where(mask_BS, sample_BS, PADDING).reshape(-1).astype(np.int32),
        np.where(mask_BS, position_BS, 0).reshape(-1).astype(np.int32),
        mask_BS.sum(1).astype(np.int32),
    )


def packed_slots(
    cumulative_lengths: npt.ArrayLike, num_slots: int | None = None, *, lengths: npt.ArrayLike | None = None
) -> Slots:
    """Slots of a packed batch from cumulative lengths [B + 1] (0 first); slots beyond the last are padding.

    lengths  [B] real tokens of each sequence, where the cumulative lengths count padding behind each one too
    """
    ends = np.asarray(cumulative_lengths, np.int64)
    if ends.ndim != 1 or len(ends) < 1 or ends[0] != 0 or (np.diff(ends) < 0).any():
        raise UserError(f"cumulative lengths start at 0 and never fall, got {ends.tolist()[:8]}")
    total = int(ends[-1]) if num_slots is None else num_slots
    if total < ends[-1]:
        raise UserError(f"{num_slots} slots can not hold {ends[-1]} tokens")
    spans = np.diff(ends)
    real = spans if lengths is None else np.asarray(lengths, np.int64)
    if real.shape != spans.shape or (real > spans).any() or (real < 0).any():
        raise UserError(f"lengths {real.tolist()[:8]} do not fit the packed spans {spans.tolist()[:8]}")
    sample_N = np.full(total, PADDING, np.int32)
    position_N = np.zeros(total, np.int32)
    at = np.arange(ends[-1]) - np.repeat(ends[:-1], spans)
    token = at < np.repeat(real, spans)
    sample_N[: ends[-1]] = np.where(token, np.repeat(np.arange(len(spans)), spans), PADDING)
    position_N[: ends[-1]] = np.where(token, at, 0)
    return Slots(sample_N, position_N, real.astype(np.int32))


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """Routes laid out for one forward.

    ids_NLK    expert ids in their narrow type; K distinct ids in range wherever replay_NL is set
    replay_NL  bool: the slot's experts at that layer are forced; elsewhere the live router chooses
    """

    ids_NLK: Array
    replay_NL: Array
    slots: Slots
    layer_ids: tuple[int, ...]
    num_experts: int

    @property
    def top_k(self) -> int:
        return int(self.ids_NLK.shape[2])

    def __getitem__(self, index: Any) -> ReplayBatch:
        """The part at a slice or index array of slots (a context- or sequence-parallel rank's)."""
        return ReplayBatch(
            self.ids_NLK[index], self.replay_NL[index], self.slots[index], self.layer_ids, self.num_experts
        )

    def layers(self, first: int, end: int) -> ReplayBatch:
        """The columns of decoder layers first <= layer < end (a pipeline stage's)."""
        inside = [c for c, layer in enumerate(self.layer_ids) if first <= layer < end]
        layer_ids = tuple(self.layer_ids[c] for c in inside)
        return ReplayBatch(self.ids_NLK[:, inside], self.replay_NL[:, inside], self.slots, layer_ids, self.num_experts)


def lay_out(
    samples: Sequence[Routes | None],
    slots: Slots,
    *,
    replay: Sequence[npt.ArrayLike | slice | None] | None = None,
    on_missing: Literal["raise", "live"] = "raise",
    truncated: bool = False,
) -> ReplayBatch:
    """Lay the samples' routes into the slots of one forward.

    samples    per sample its routes; None: its tokens use the live router
    replay     per sample which positions to force: None (all), a slice of positions, or bool [S]
    on_missing a row that should be forced and was not recorded: raise, or let the live router choose
    truncated  allow more rows than the sequence has tokens (the trainer cut it)
    The last token of a sequence was never fed during the rollout; without a row of its own it uses the live router.
    Raises UserError naming sample, token and layer for a missing row, an id out of range, ids that are not distinct,
    and naming the sample for a wrong row count or another model's routes; where layers choose different numbers.
    """
    given = [routes for routes in samples if routes is not None]
    if not given:
        raise UserError("no sample of the batch has routes")
    if len(samples) != len(slots.length_B):
        raise UserError(f"{len(samples)} samples of routes for {len(slots.length_B)} sequences")
    model = given[0]
    if model.layer_top_k:
        raise UserError(
            f"the layers choose {list(model.layer_top_k)} experts: replay forces the same number in all layers, so "
            "routes of this model can be read and compared, but not replayed"
        )
    dtype = narrow_dtype(model.num_experts, model.top_k)
    ids_NLK = np.full((len(slots), len(model.layer_ids), model.top_k), fill_value(dtype), dtype)
    wanted_N = np.zeros(len(slots), bool)
    order = np.argsort(slots.sample_N, kind="stable")
    edges = np.searchsorted(slots.sample_N[order], np.arange(len(samples) + 1))
    for i, routes in enumerate(samples):
        if routes is None:
            continue
        _check_sample(i, routes, model, int(slots.length_B[i]), truncated)
        at = order[edges[i] : edges[i + 1]]
        position = slots.position_N[at]
        wanted_N[at] = _wanted(i, replay, routes, int(slots.length_B[i]))[position]
        held = (position >= routes.start) & (position < routes.stop)
        ids_NLK[at[held]] = routes.experts_TLK[position[held] - routes.start]
    batch = ReplayBatch(
        ids_NLK,
        np.repeat(wanted_N[:, None], len(model.layer_ids), 1),
        slots,
        model.layer_ids,
        model.num_experts,
    )
    return _check_rows(batch, on_missing)


def _check_sample(i: int, routes: Routes, model: Routes, length: int, truncated: bool) -> None:
    for name in ("layer_ids", "num_experts", "top_k"):
        if getattr(routes, name) != getattr(model, name):
            raise UserError(f"sample {i}: {name} {getattr(routes, name)}, the first sample has {getattr(model, name)}")
    if routes.stop not in (length - 1, length) and not (truncated and routes.stop > length):
        raise UserError(
            f"sample {i}: routes end at position {routes.stop}, the sequence has {length} tokens (rows are one less, "
            "or as many): the token ids differ from the rollout's, or the sequence was cut (then: truncated=True)"
        )


def _wanted(i: int, replay: Sequence[Any] | None, routes: Routes, length: int) -> Array:
    """bool [S]: positions of sample i to force."""
    choice = None if replay is None else replay[i]
    wanted_S = np.zeros(length, bool)
    if choice is None or isinstance(choice, slice):
        wanted_S[choice or slice(None)] = True
    else:
        wanted_S = np.array(choice, bool)
        if wanted_S.shape != (length,):
            raise UserError(f"sample {i}: replay mask of shape {list(wanted_S.shape)} for {length} tokens")
    if routes.stop == length - 1:
        wanted_S[length - 1] = False
    return wanted_S


def _check_rows(batch: ReplayBatch, on_missing: str) -> ReplayBatch:
    """Every forced row is there, in range and distinct. Returns the batch, without its missing rows if so asked."""
    ids_NLK, forced_NL = batch.ids_NLK, batch.replay_NL
    missing_NL = (ids_NLK == fill_value(ids_NLK.dtype)).all(-1) & forced_NL
    if missing_NL.any():
        if on_missing == "raise":
            raise UserError(f"{_where(batch, missing_NL)} has no recorded row ({int(missing_NL.sum())} such rows)")
        forced_NL = forced_NL & ~missing_NL
    wide_NLK = ids_NLK.astype(np.int32)
    bad_NL = ((wide_NLK < 0) | (wide_NLK >= batch.num_experts)).any(-1) & forced_NL
    if bad_NL.any():
        raise UserError(f"{_where(batch, bad_NL)} has an expert id outside 0..{batch.num_experts - 1}")
    ordered_NLK = np.sort(ids_NLK, -1)
    twice_NL = (ordered_NLK[..., 1:] == ordered_NLK[..., :-1]).any(-1) & forced_NL
    if twice_NL.any():
        raise UserError(f"{_where(batch, twice_NL)} has an expert twice")
    return ReplayBatch(ids_NLK, forced_NL, batch.slots, batch.layer_ids, batch.num_experts)


def _where(batch: ReplayBatch, bad_NL: Array) -> str:
    n, c = (int(i) for i in np.argwhere(bad_NL)[0])
    slots = batch.slots
    row = batch.ids_NLK[n, c].tolist()
    return f"sample {slots.sample_N[n]} token {slots.position_N[n]} layer {batch.layer_ids[c]} (row {row})"
