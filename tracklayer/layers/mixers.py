"""Which module runs which recurrent spec."""

from __future__ import annotations

from torch import Tensor

from tracklayer.layers.gated_delta import GatedDelta
from tracklayer.layers.kda import KDA
from tracklayer.layers.recurrent import Recurrent
from tracklayer.layers.recurrent_spec import GatedDeltaSpec, KDASpec, RecurrentSpec


def recurrent_mixer(spec: RecurrentSpec, hidden_size: int, cos_sin_PD: Tensor | None, place: int) -> Recurrent:
    """The mixer of a spec; `place` is the index of its pools in Batch.states. TypeError for a spec without a module."""
    match spec:
        case GatedDeltaSpec():
            return GatedDelta(spec, hidden_size, place)
        case KDASpec():
            return KDA(spec, hidden_size, place)
    raise TypeError(f"no module for {type(spec).__name__}")
