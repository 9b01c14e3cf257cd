"""Replay of routes in Hugging Face models: the recorded experts are forced, everything else is the model's own code.

N token slots of a forward, E experts, K chosen, L MoE layers.

Every router of transformers chooses experts by one operation on its scores [N, E] (nearly always `torch.topk`). Replay
stands in for that one operation while the router runs: it returns the recorded ids and the scores *gathered at them*.
What the family does next (renormalise, scale, gather unbiased scores, cast) is its own code, so its rule holds exactly
and gradients reach the router. Families that choose by another operation are rows of CHOOSERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tracklayer.errors import UserError
from tracklayer.replay.packing import ReplayBatch, Slots
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.record import Routes

# Where transformers and torch keep the function that runs a layer under gradient checkpointing.
CHECKPOINT_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
EXPERT_COUNTS = ("n_routed_experts", "num_experts")  # the first counts LongCat's zero experts too
ORIGINAL = "_tracklayer_original"


@dataclass(frozen=True, slots=True)
class Router:
    """One MoE layer's router as it stands in a model."""

    layer: int
    path: str
    module: nn.Module
    block: nn.Module

    @property
    def chooses_in_block(self) -> bool:
        """The block, not the router module, turns logits into ids (DBRX, older classes of the sigmoid families)."""
        return hasattr(self.block, "route_tokens_to_experts")

    @property
    def num_experts(self) -> int | None:
        """Width of its scores; None when the structure does not tell."""
        for owner in (self.module, self.block):
            for name in EXPERT_COUNTS:
                if isinstance(getattr(owner, name, None), int):
                    return int(getattr(owner, name))
        matrices = [p for p in self.module.parameters() if p.dim() == 2]
        return int(matrices[0].shape[0]) if len(matrices) == 1 else None

    @property
    def top_k(self) -> int | None:
        config = getattr(self.module, "config", None)
        owners = ((self.module, "top_k"), (self.block, "top_k"), (config, "top_k_experts"))
        return next((int(getattr(o, name)) for o, name in owners if isinstance(getattr(o, name, None), int)), None)


def find_routers(model: nn.Module) -> list[Router]:
    """Routers in layer order: a `gate` or `router` beside `experts`, in a numbered layer that is not an MTP layer.

    Raises UserError when there is none, or when two stand in layers of the same number (name the decoder then).
    """
    found: dict[int, Router] = {}
    for path, block in model.named_modules():
        module = next(
            (m for name in ("gate", "router") if isinstance(m := getattr(block, name, None), nn.Module)), None
        )
        parts = path.split(".")
        numbers = [int(part) for part in parts if part.isdecimal()]
        if (
            module is None
            or not isinstance(getattr(block, "experts", None), nn.Module)
            or not numbers
            or "mtp" in parts
        ):
            continue
        router = Router(numbers[-1], path, module, block)
        if router.layer in found:
            raise UserError(
                f"layer {router.layer} has routers at {found[router.layer].path} and {path}: "
                "pass the decoder that the routes are of instead of the whole model"
            )
        found[router.layer] = router
    if not found:
        raise UserError(f"{type(model).__name__} has no router beside experts in a numbered layer: not a MoE model")
    return [found[layer] for layer in sorted(found)]


def route_shape(model: nn.Module) -> RouteShape:
    """What this model's routes look like: layers that route, K, and the bound of ids. Raises UserError if unknown."""
    routers = find_routers(model)
    sizes = {(r.top_k, r.num_experts) for r in routers}
    top_k, num_experts = next(iter(sizes))
    if len(sizes) != 1 or top_k is None or num_experts is None:
        raise UserError(
            f"the routers of {type(model).__name__} do not agree on (top_k, experts): {sorted(sizes, key=str)}"
        )
    # The list that holds the layers, not the config: LongCat's num_hidden_layers counts each layer twice.
    parts = routers[0].path.split(".")
    at = max(i for i, part in enumerate(parts) if part.isdecimal())
    layers = model.get_submodule(".".join(parts[:at]))
    return RouteShape(
        layer_ids=tuple(r.layer for r in routers),
        top_k=top_k,
        num_experts=num_experts,
        num_hidden_layers=len(list(layers.children())),
    )


@dataclass(frozen=True, slots=True)
class Observed:
    """What one router did in the last forward: the experts it would choose itself, and the scores it chooses by.

    live_ids_NK int64; scores_NE as the router forms them (biased and group-masked where the family does), None where
    no scores choose (hash routers). With the routes of earlier layers forced, differences do not cascade.
    """

    live_ids_NK: Tensor
    scores_NE: Tensor | None


class _Choice(TorchFunctionMode):
    """Stands in for the choosing operation of one router during one call of it."""

    def __init__(self, replay: Replay, router: Router) -> None:
        super().__init__()
        self.replay = replay
        self.router = router
        self.times = 0
        self._maxima = 0
        self._unmasked: dict[int, tuple[Tensor, Tensor]] = {}
        names = [cls.__name__ for cls in type(router.module).__mro__]
        self._stand_ins = CHOOSERS[next((name for name in names if name in CHOOSERS), "*")]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        stand_in = self._stand_ins.get(func)
        return result if stand_in is None else stand_in(self, result, args[0] if args else kwargs["input"], kwargs)

    def _is_scores(self, x: Any) -> bool:
        """[N, E]: the scores of groups have another width."""
        width = self.router.num_experts if self.replay.batch is None else self.replay.batch.num_experts
        return isinstance(x, Tensor) and x.dim() == 2 and width in (None, x.shape[1])

    def _force(self, live_NK: Tensor, scores_NE: Tensor | None) -> Tensor:
        """The forced ids where the batch says so, the live ones elsewhere; int64 [N, K]. Notes the live ones."""
        if self.replay.observe:
            scores_NE = None if scores_NE is None else scores_NE.detach().clone()
            self.replay.observed[self.router.layer] = Observed(live_NK.detach().clone(), scores_NE)
        self.times += 1
        return self.replay.force(self.router.layer, live_NK)

    # One stand-in for each operation that chooses: (result of the operation, its input, its keywords) -> result.

    def topk(self, result: Any, scores_NE: Tensor, kwargs: Any) -> Any:
        if not self._is_scores(scores_NE):
            return result
        ids_NK = self._force(result.indices, scores_NE)
        _, full_NE = self._unmasked.get(id(scores_NE), (None, scores_NE))
        values_NK = full_NE.gather(1, ids_NK)
        if full_NE is not scores_NE:
            # Live choices keep what the family's own rule gives, masked groups included.
            values_NK = torch.where(ids_NK == result.indices, scores_NE.gather(1, ids_NK), values_NK)
        return torch.return_types.topk((values_NK, ids_NK))

    def masked_fill(self, result: Any, scores_NE: Tensor, kwargs: Any) -> Any:
        """Remember the scores before groups are masked: a forced expert of a dropped group keeps its weight."""
        if self._is_scores(scores_NE):
            self._unmasked[id(result)] = (result, scores_NE)  # with the result, so that its id stays its own
        return result

    def max(self, result: Any, scores_NE: Tensor, kwargs: Any) -> Any:
        """Sparsemixer: each of two experts is the maximum of what is left; in training it is drawn by two more maxima.

        Forced experts follow the inference rule in training too: the rollout drew nothing.
        """
        if not self._is_scores(scores_NE) or kwargs.get("dim") != -1:
            return result
        if not self.times:
            best_N1 = scores_NE.max(-1, keepdim=True).indices
            second_N1 = scores_NE.scatter(-1, best_N1, float("-inf")).max(-1, keepdim=True).indices
            self._force(torch.cat([best_N1, second_N1], 1), scores_NE)
        k = self._maxima // (3 if self.router.module.training else 1)
        self._maxima += 1
        ids_N1 = result.indices if kwargs.get("keepdim") else result.indices[:, None]
        ids_N1 = self.replay.force(self.router.layer, ids_N1, slice(k, k + 1))
        values_N1 = scores_NE.gather(1, ids_N1)
        if not kwargs.get("keepdim"):
            values_N1, ids_N1 = values_N1[:, 0], ids_N1[:, 0]
        return torch.return_types.max((values_N1, ids_N1))

    def lookup(self, result: Any, table: Any, kwargs: Any) -> Any:
        """Hash routers: the experts are the row of a table at the token id."""
        return self._force(result.long(), None) if table is self.router.module.tid2eid else result


TOPK: dict[Any, Callable[..., Any]] = {
    torch.topk: _Choice.topk,
    Tensor.topk: _Choice.topk,
    Tensor.masked_fill: _Choice.masked_fill,
}
# Router class -> the operations that choose in it. A new way to choose is a new row and its stand-in.
CHOOSERS: dict[str, dict[Any, Callable[..., Any]]] = {
    "*": TOPK,
    "PhimoeTopKRouter": {torch.max: _Choice.max, Tensor.max: _Choice.max},
    "DeepseekV4HashRouter": {Tensor.__getitem__: _Choice.lookup},
}


class Replay:
    """What `replay_routes` yields. `observed` maps a layer to what its router did in the last forward."""

    def __init__(self, model: nn.Module, batch: ReplayBatch | None, observe: bool) -> None:
        self.model = model
        self.batch = batch
        self.observe = observe
        self.routers = find_routers(model)
        self.observed: dict[int, Observed] = {}
        self._calls = dict.fromkeys((r.layer for r in self.routers), 0)
        self._depth = 0
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        if batch is not None:
            _check_model(self.routers, batch)

    def force(self, layer: int, live_NK: Tensor, columns: slice = slice(None)) -> Tensor:
        """The batch's ids of that layer where it says so, else the live ones. `columns` picks among the K."""
        batch = self.batch
        if batch is None:
            return live_NK
        if len(live_NK) != len(batch.slots):
            raise UserError(
                f"the forward has {len(live_NK)} tokens (layer {layer}), the batch was laid out for {len(batch.slots)}"
            )
        if live_NK.device not in self._on_device:
            tensors = torch.tensor(batch.ids_NLK), torch.tensor(batch.replay_NL)
            self._on_device[live_NK.device] = (tensors[0].to(live_NK.device), tensors[1].to(live_NK.device))
        ids_NLK, forced_NL = self._on_device[live_NK.device]
        at = batch.layer_ids.index(layer)
        ids_NK = ids_NLK[:, at, columns].long()
        if ids_NK.shape != live_NK.shape:
            raise UserError(
                f"the router of layer {layer} chooses {live_NK.shape[1]} experts, routes have {batch.top_k}"
            )
        return torch.where(forced_NL[:, at, None], ids_NK, live_NK)

    def observed_routes(self, slots: Slots) -> list[Routes]:
        """The live choices of the last forward as routes of each sample (rows for all its tokens).

        Needs observe=True and a forward; raises UserError otherwise.
        """
        if len(self.observed) != len(self.routers):
            raise UserError("nothing was observed: replay_routes(..., observe=True) and run a forward inside")
        shape = route_shape(self.model)
        ids_NLK = torch.stack([self.observed[r.layer].live_ids_NK for r in self.routers], 1).cpu().numpy()
        samples = []
        for i in range(len(slots.length_B)):
            (at,) = (slots.sample_N == i).nonzero()
            start = int(slots.position_N[at].min()) if len(at) else 0
            rows = ids_NLK[at[slots.position_N[at].argsort()]]
            samples.append(Routes(rows, shape.layer_ids, shape.num_experts, start))
        return samples

    @contextmanager
    def _active(self) -> Iterator[None]:
        """The model with its routers and its checkpoint functions wrapped; as it was afterwards, whatever happens."""
        undo: list[tuple[dict[str, Any], str, Any]] = []
        self._depth += 1
        try:
            for router in self.routers:
                _wrap(undo, router.module, "forward", partial(self._routed, router, not router.chooses_in_block))
                if router.chooses_in_block:
                    _wrap(undo, router.block, "route_tokens_to_experts", partial(self._routed, router, True))
            for module in self.model.modules():
                for name in CHECKPOINT_ATTRIBUTES:
                    if callable(getattr(module, name, None)):
                        _wrap(undo, module, name, self._checkpointed)
            yield
        finally:
            self._depth -= 1
            for attributes, name, before in reversed(undo):
                attributes.pop(name)
                if before is not None:
                    attributes[name] = before

    def _routed(self, router: Router, chooses: bool, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a router's forward (or its block's choosing method) with the choice forced."""
        choice = _Choice(self, router)
        with choice:
            result = original(*args, **kwargs)
        if choice.times != chooses:
            raise UserError(
                f"the router at {router.path} ({type(router.module).__name__}) chose its experts {choice.times} times "
                f"by an operation that replay can stand in for, not {int(chooses)}: a fused kernel may have replaced it"
            )
        self._calls[router.layer] += choice.times
        return result

    def _checkpointed(
        self, original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer under gradient checkpointing so that its recomputation sees this batch's routes, whenever it is.

        The backward pass may come after the `with` block, or while another micro-batch's block is open.
        """

        def layer(*layer_args: Any, **layer_kwargs: Any) -> Any:
            if self._depth:
                return function(*layer_args, **layer_kwargs)
            with self._active():
                return function(*layer_args, **layer_kwargs)

        return original(layer, *args, **kwargs)

    def _check_used(self) -> None:
        idle = [layer for layer, calls in self._calls.items() if not calls]
        if idle:
            raise UserError(
                f"the routers of layers {idle} were not called inside the block: "
                + ("no forward ran" if len(idle) == len(self._calls) else "another path computes these layers")
            )


def _wrap(undo: list[tuple[dict[str, Any], str, Any]], owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put around(original, ...) in the place of owner.name, on the instance, and note how to take it away.

    What another replay wrapped already is unwrapped first: a recomputation sees its own routes only.
    """
    current = getattr(owner, name)
    wrapped = partial(around, getattr(current, ORIGINAL, current))
    setattr(wrapped, ORIGINAL, getattr(current, ORIGINAL, current))
    undo.append((owner.__dict__, name, owner.__dict__.get(name)))
    owner.__dict__[name] = wrapped


def _check_model(routers: list[Router], batch: ReplayBatch) -> None:
    layers = tuple(r.layer for r in routers)
    if layers != batch.layer_ids:
        raise UserError(f"routes are of layers {list(batch.layer_ids)}, the model routes in layers {list(layers)}")
    for router in routers:
        for name, theirs in (("top_k", batch.top_k), ("num_experts", batch.num_experts)):
            mine = getattr(router, name)
            if mine is not None and mine != theirs:
                raise UserError(f"layer {router.layer}: routes have {name} {theirs}, the model has {mine}")


@contextmanager
def replay_routes(model: nn.Module, batch: ReplayBatch | None, *, observe: bool = False) -> Iterator[Replay]:
    """Force the experts of `batch` in every MoE layer of `model` for the forwards inside the block.

    batch    from `packing.lay_out`, made for exactly the tokens of the forward; None: force nothing, only observe
    observe  keep what each router would choose itself, and its scores (`Replay.observed`)
    Gradient checkpointing recomputes with the same routes, inside the block or after it.
    Raises UserError before the forward when the model and the batch do not fit, and at the end of the block when a
    router was never called. The model is unchanged afterwards, also after an exception.
    """
    replay = Replay(model, batch, observe)
    if any(hasattr(r.module.forward, ORIGINAL) for r in replay.routers):
        raise UserError("routes are already being replayed in this model: blocks can not be nested")
    with replay._active():
        yield replay
    replay._check_used()
