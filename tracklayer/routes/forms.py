"""The wire forms of routes as a table: what each engine sends, each trainer takes, and what a model's routes are.

T rows, L MoE layers, K chosen experts, H decoder layers of the model (dense ones included). numpy only.
Sources of each row: docs/reading_routes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tracklayer.errors import UserError
from tracklayer.routes.checks import differing
from tracklayer.routes.ids import narrow_dtype
from tracklayer.routes.record import Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """What routes of one model look like.

    layer_ids          decoder layers that route, ascending
    top_k, num_experts K, and the bound of ids (zero experts count, shared ones do not)
    num_hidden_layers  H, all decoder layers; None: unknown, then forms over all layers can not be used
    layer_top_k        how many experts each layer chooses where they differ, K being the largest; None: all choose K
    """

    layer_ids: tuple[int, ...]
    top_k: int
    num_experts: int
    num_hidden_layers: int | None = None
    layer_top_k: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.layer_top_k != differing(self.layer_top_k, len(self.layer_ids), self.top_k):
            raise UserError(f"all layers choose {self.top_k} experts: leave layer_top_k out")

    @classmethod
    def of(cls, routes: Routes, num_hidden_layers: int | None = None) -> RouteShape:
        return cls(
            layer_ids=routes.layer_ids,
            top_k=routes.top_k,
            num_experts=routes.num_experts,
            num_hidden_layers=num_hidden_layers,
            layer_top_k=routes.layer_top_k,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type in which ids are kept (`narrow_dtype`)."""
        return narrow_dtype(self.num_experts, 1 if self.layer_top_k else self.top_k)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's rows, [L, K]."""
        return len(self.layer_ids) * self.top_k * self.dtype.itemsize

    def fits(self, routes: Routes) -> bool:
        """Whether `routes` are of this model."""
        return RouteShape.of(routes, self.num_hidden_layers) == self

    def columns(self, layers: str) -> int:
        """Length of the layer axis: "moe" is L, "all" is H."""
        if layers == "moe":
            return len(self.layer_ids)
        if self.num_hidden_layers is None:
            raise UserError("this form has a column for every decoder layer: num_hidden_layers must be given")
        if self.num_hidden_layers <= self.layer_ids[-1]:
            raise UserError(f"layer {self.layer_ids[-1]} is not one of {self.num_hidden_layers} decoder layers")
        return self.num_hidden_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How routes lie on the wire.

    container  base64 / base85 / bytes: flat ids; npy / npy_base64: a .npy file; array: numpy; list: nested lists;
               raw: {"data", "shape", "dtype", "start"}
    dtype      of flat bytes and of what is written; None: the container says, written as narrow as it goes
    layers     all: a column for each of the H decoder layers; moe: for the L that route; None: the caller must say
    axes       TLK, or LTK where layers come first
    dense      what the columns of dense layers hold; None: anything (the producer does not clear them)
    missing    how a missing row is written: None: not at all, -1, or 0 (an all-zero row; not a route, as K ids differ)
    last_row   the last token of the sequence has a row (T = S), otherwise T = S - 1; None: either
    """

    container: Literal["base64", "base85", "bytes", "npy", "npy_base64", "array", "list", "raw"]
    dtype: str | None = None
    layers: Literal["all", "moe"] | None = "moe"
    axes: Literal["TLK", "LTK"] = "TLK"
    dense: int | None = 0
    missing: Literal[-1, 0] | None = None
    last_row: bool | None = False


FORMS: dict[str, Form] = {
    # producers
    "sglang": Form(container="base64", dtype="int32", layers="all"),
    "sglang_moe": Form(container="base64", dtype="int32", layers="moe"),
    "sglang_jax": Form(container="base64", dtype="int32", layers="all", axes="LTK", dense=-1),
    "dynamo": Form(container="base64", dtype="int32", layers="all"),
    "vllm_0.14": Form(container="array", dtype="int32", layers="all", missing=0),
    "vllm_0.21": Form(container="array", dtype="int16", layers="moe", missing=-1),
    "vllm_0.21_http": Form(container="list", dtype="int16", layers="moe", missing=-1),
    "vllm_0.22": Form(container="npy_base64", layers=None),
    "tensorrt_llm": Form(container="array", dtype="int32", layers="moe", missing=-1),
    "atom": Form(container="array", dtype="int16", layers="all", dense=None),
    "lmdeploy": Form(container="list", dtype="uint16", layers="all", dense=None),
    "megatron": Form(container="array", dtype="int32", layers="moe", last_row=None),
    "prime_rl_base85": Form(container="base85", dtype="int32", layers="moe"),
    "prime_rl": Form(container="raw", layers="moe"),
    # consumers
    "slime": Form(container="array", dtype="int32", layers="all"),
    "miles": Form(container="array", dtype="int32", layers="all"),
    "vime": Form(container="array", dtype="int32", layers="all"),
    "areal": Form(container="array", dtype="int32", layers="all"),
    "verl": Form(container="array", dtype="int16", layers=None),
    "nemo_rl": Form(container="array", layers="moe", missing=-1, last_row=True),
    "skyrl": Form(container="list", layers=None),
    "ms_swift": Form(container="array", layers=None, last_row=None),
    "xtuner": Form(container="array", dtype="uint16", layers="all", dense=None),
    "tunix": Form(container="array", dtype="int32", layers="moe", missing=-1, last_row=None),
    # our own file
    "npy": Form(container="npy", layers="moe", missing=-1),
}


def resolve_form(form: str | Form, declared: Mapping[str, Any]) -> Form:
    """The form of that name (or the Form itself), with the declared fields changed."""
    if isinstance(form, str):
        if form not in FORMS:
            raise UserError(f"unknown form {form!r}, known: {', '.join(FORMS)}")
        form = FORMS[form]
    return replace(form, **declared)
