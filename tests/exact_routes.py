"""Recorded routes against the choice that a reference makes on the very hidden states that each router read.

A forward hook on every router writes what it read to a pool of its own, at the slots of the tokens, as the routes are
written: one captured copy in a CUDA graph, so that replays refresh it. Afterwards each recorded row is compared with
the choice of the torch reference on logits formed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_tools import SMALL

from tracklayer.config import EngineConfig
from tracklayer.engine.engine import EngineCore
from tracklayer.kernels.norm import as_tensor
from tracklayer.kernels.topk import select_experts_ref
from tracklayer.layers.moe import MoE
from tracklayer.routes.ids import fill_value
from tracklayer.runner.load import load_model

# How far accumulating in float32, in any order, may move a logit of the tiny models (all below about 8).
NEAR = 2e-5


@dataclass
class Tapped:
    """An engine whose routers' inputs are kept: read_SLD[slot, column], in the model's dtype."""

    core: EngineCore
    moes: list[MoE]
    read_SLD: torch.Tensor


@dataclass
class Compared:
    """Rows of (slot, layer): all; steady (no order of summing changes the choice); those equal to the reference's."""

    rows: int
    steady: int
    same: int
    steady_same: int

    def __str__(self) -> str:
        ties, same_ties = self.rows - self.steady, self.same - self.steady_same
        return f"{self.rows} rows: {self.steady_same} of {self.steady} equal, and {same_ties} of {ties} near ties"

    def check(self) -> None:
        """Every steady row equals the reference's, and of the near ties all but a few."""
        print(self)
        assert self.rows > 100 and self.steady > 0.95 * self.rows, f"says too little: {self}"
        assert self.steady_same == self.steady, str(self)
        assert self.same >= 0.99 * self.rows, str(self)


def tapped_core(folder: Path, **config: Any) -> Tapped:
    """An EngineCore over hooked routers; the hooks stand before any graph is captured."""
    settings = EngineConfig(model_path=str(folder), **{**SMALL, **config})
    model = load_model(settings, 0)
    moes = [module for module in model.decoder.modules() if isinstance(module, MoE)]
    slots = settings.max_total_tokens + settings.page_size
    read_SLD = torch.zeros(
        slots, len(moes), model.spec.hidden_size, dtype=model.dtype, device=model.device
    )  # made before the graphs that write to it

    def tap(router: Any, args: tuple[Any, ...], routing: Any) -> None:
        x, _, _, batch = args
        if batch.pool_SLK is not None:
            read_SLD[batch.slots_T.long(), router.column] = as_tensor(x)

    for moe in moes:
        moe.router.register_forward_hook(tap)
    core = EngineCore(settings, model=model)
    assert core.runner.caches.pool is not None and len(core.runner.caches.pool.tensor_SLK) <= slots
    return Tapped(core, moes, read_SLD)


def compare(tapped: Tapped) -> Compared:
    """Every row that the pool holds, page 0 left out."""
    pool_SLK = tapped.core.runner.caches.pool.tensor_SLK
    page = tapped.core.config.page_size
    total = Compared(0, 0, 0, 0)
    for column, moe in enumerate(tapped.moes):
        router, spec = moe.router, moe.router.spec
        ids_SK = pool_SLK[page:, column, : spec.top_k]
        written_S = (ids_SK != fill_value_of(pool_SLK)).any(-1)
        x_TD = tapped.read_SLD[page : page + len(ids_SK), column][written_S]
        got_TK = ids_SK[written_S].int()
        logits_TE = x_TD.double() @ moe.gate_ED.double().t()
        if moe.gate_bias_E is not None:
            logits_TE += moe.gate_bias_E.double()
        dtype = x_TD.dtype if spec.gate_dtype == "model" else torch.float32  # what the rule says the logits are
        rest = {"bias_E": router.bias_E, "expert_scale_E": router.scale_E}
        want_TK = select_experts_ref(logits_TE.to(dtype), spec, **rest).ids_TK
        same_T, steady_T = (got_TK == want_TK).all(1), torch.ones(len(got_TK), dtype=torch.bool, device=x_TD.device)
        for _ in range(20):
            moved_TE = logits_TE + NEAR * torch.randn_like(logits_TE)
            steady_T &= (select_experts_ref(moved_TE.to(dtype), spec, **rest).ids_TK == want_TK).all(1)
        total.rows += len(got_TK)
        total.steady += int(steady_T.sum())
        total.same += int(same_T.sum())
        total.steady_same += int((same_T & steady_T).sum())
    return total


def fill_value_of(pool_SLK: torch.Tensor) -> int:
    return fill_value(torch.empty(0, dtype=pool_SLK.dtype).numpy().dtype)


def poison_page_0(core: EngineCore) -> None:
    """NaN wherever padded lines write and read: page 0 of every cache."""
    for caches in core.runner.caches.kv:
        for cache in caches:
            cache[: core.config.page_size] = torch.nan
