"""Which module runs which recurrent spec."""

from __future__ import annotations

from torch import Tensor

from tracklayer.layers.gated_delta import GatedDelta
from tracklayer.layers.kda import KDA
from tracklayer.layers.lightning import Lightning
from tracklayer.layers.mamba1 import Mamba1
from tracklayer.layers.mamba2 import Mamba2
from tracklayer.layers.recurrent import Recurrent
from tracklayer.layers.recurrent_spec import (
    GatedDeltaSpec,
    KDASpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
)
from tracklayer.layers.short_conv import ShortConv


def recurrent_mixer(spec: RecurrentSpec, hidden_size: int, cos_sin_PD: Tensor | None, place: int) -> Recurrent:
    """The mixer of a spec; `place` is the index of its pools in Batch.states. TypeError for a spec without a module."""
    match spec:
        case GatedDeltaSpec():
            return GatedDelta(spec, hidden_size, place)
        case KDASpec():
            return KDA(spec, hidden_size, place)
        case LightningSpec():
            return Lightning(spec, hidden_size, cos_sin_PD, place)
        case Mamba1Spec():
            return Mamba1(spec, hidden_size, place)
        case Mamba2Spec():
            return Mamba2(spec, hidden_size, place)
        case ShortConvSpec():
            return ShortConv(spec, hidden_size, place)
    raise TypeError(f"no module for {type(spec).__name__}")
