"""Choice of experts: scores, ids, weights, and the one store of ids into the route pool.

T tokens, E routed experts (plus Z zero experts), K chosen, S slots, L MoE layers, G groups.

The rule, for every family (sources: the model's own code, see docs/models.md):
    score = f(logits);  choice = score + bias;  groups mask choice;  ids = topk(choice)
    weights = score[ids];  renormalise;  * scale
Order is contract: ids descend by choice score, ties go to the lower id. NaN counts as the lowest score, so that
every row holds K distinct ids in range.

Ids must not depend on how a device rounds exp or tanh. Every score is monotone in its logit, so where the rule
allows (no bias, and no groups or groups by their maximum) the choice is made on the raw logits. Elsewhere (bias,
groups by their top 2) scores are formed in float64 and rounded to float32, on every device alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tracklayer.kernels.dispatch import use_triton

NEG_INF = float("-inf")
FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """One family's routing rule, as data.

    score            softmax over all experts, sigmoid, sqrt_softplus, sparsemixer (K = 2), or none (raw logits)
    after_topk       choose on raw logits, score only the chosen (Granite, GPT-OSS, Llama 4)
    choice_bias      a per-expert bias is added for the choice only, never to the weights
    gate_bias        the gate has a bias that is part of the logits (GPT-OSS)
    num_groups, topk_groups, group_score
                     experts lie in equal contiguous groups; only the best `topk_groups` by max / sum of top 2 stay
    group_mask       what masked experts' choice score becomes (0.0 in DeepSeek-V2, -inf elsewhere)
    renormalize, renorm_eps, renorm_min, renorm_p
                     divide by (sum(w^p)^(1/p) + eps), never by less than renorm_min
    scale, scale_output
                     factor on the weights, or (scale_output) on the sum of the experts (same in exact arithmetic)
    weight_on_input  the weight multiplies the expert's input (Llama 4)
    num_zero_experts ids in [num_experts, num_experts + Z) return their input (LongCat)
    per_expert_scale the weight is multiplied by a learned factor of its expert (Gemma 4)
    softcap          logits = softcap * tanh(logits / softcap) before scoring (Grok-1)
    jitter           sparsemixer's threshold
    hash_vocab       experts are looked up by token id in a table of so many rows (DeepSeek-V4's first layers)
    gate_dtype       dtype of the gate product's result, as in the family's reference: model (dtype of the
                     activations, then cast) or float32 (operands cast too)
    score_dtype      dtype in which scores are formed: float32, or model (scores rounded to the activations' dtype)
    weights_dtype    dtype that the weights are rounded to before use: float32 or model
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sqrt_softplus", "sparsemixer", "none"] = "softmax"
    after_topk: bool = False
    choice_bias: bool = False
    gate_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    group_mask: float = NEG_INF
    renormalize: bool = False
    renorm_eps: float = 0.0
    renorm_min: float = 0.0
    renorm_p: float = 1.0
    scale: float = 1.0
    scale_output: bool = False
    weight_on_input: bool = False
    num_zero_experts: int = 0
    per_expert_scale: bool = False
    softcap: float | None = None
    jitter: float = 0.01
    hash_vocab: int = 0
    gate_dtype: Literal["model", "float32"] = "model"
    score_dtype: Literal["model", "float32"] = "float32"
    weights_dtype: Literal["model", "float32"] = "float32"

    def __post_init__(self) -> None:
        width = self.num_logits
        if self.num_experts < 1 or not 1 <= self.top_k <= width:
            raise ValueError(f"top_k {self.top_k} of {width} experts is impossible")
        if self.num_groups > 1:
            per_group = width // self.num_groups
            if width % self.num_groups or not 1 <= self.topk_groups <= self.num_groups:
                raise ValueError(f"{width} experts do not lie in {self.num_groups} groups keeping {self.topk_groups}")
            if self.group_score == "top2" and per_group < 2:
                raise ValueError(f"group_score top2 needs groups of at least 2 experts, got {per_group}")
            if self.topk_groups * per_group < self.top_k and self.group_mask == NEG_INF:
                raise ValueError(f"{self.topk_groups} groups of {per_group} hold fewer than top_k {self.top_k} experts")
        if self.score == "sparsemixer" and self.top_k != 2:
            raise ValueError(f"sparsemixer chooses 2 experts, not {self.top_k}")

    @property
    def num_logits(self) -> int:
        """Width of the gate's output: routed experts and zero experts."""
        return self.num_experts + self.num_zero_experts


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of one MoE layer: ids_TK int32 (logical, best first; -1: padding, no expert) and weights_TK float32.

    Built only by the router; expert kernels accept nothing else, so none can choose experts by itself.
    """

    ids_TK: Tensor
    weights_TK: Tensor


@dataclass(frozen=True, slots=True)
class RouteStore:
    """Where the chosen ids go: pool_SLK (uint8 or int16), slots_T int32 and the MoE layer's column in L."""

    pool_SLK: Tensor
    slots_T: Tensor
    column: int


def select_experts(
    logits_TE: Tensor,
    spec: RouterSpec,
    *,
    bias_E: Tensor | None = None,
    expert_scale_E: Tensor | None = None,
    store: RouteStore | None = None,
    num_tokens_1: Tensor | None = None,
) -> Routing:
    """Choose top_k experts per token by `spec` and, with `store`, write their ids into the route pool.

    logits_TE float32 or the model's dtype [T, num_logits]; bias_E, expert_scale_E float32 [num_logits].
    num_tokens_1 int32 [1], on the device: rows from there on are padding and get id -1 and weight 0 in the Routing
    (no expert is woken for them) while their store goes to the slots given, page 0.
    Returns Routing(ids int32 [T, K], weights float32 [T, K]); order and ties as the module says. One launch on CUDA.
    Raises ValueError when shapes, the store or the presence of the bias do not fit the spec.
    """
    check_router_inputs(logits_TE.shape, spec, bias_E, expert_scale_E, store)
    choose = select_experts_ref
    if use_triton(logits_TE):
        from tracklayer.kernels.select import select_experts_triton as choose  # triton is needed on a GPU only
    return choose(logits_TE, spec, bias_E=bias_E, expert_scale_E=expert_scale_E, store=store, num_tokens_1=num_tokens_1)


def check_router_inputs(
    shape: torch.Size,
    spec: RouterSpec,
    bias_E: Tensor | None,
    expert_scale_E: Tensor | None,
    store: RouteStore | None,
) -> None:
    """Refuse (ValueError) what does not fit the spec: a bias forgotten here would be a wrong route, silently."""
    if len(shape) != 2 or shape[1] != spec.num_logits:
        raise ValueError(f"router logits must be [tokens, {spec.num_logits}], got {list(shape)}")
    for name, tensor, wanted in (
        ("choice_bias", bias_E, spec.choice_bias),
        ("per_expert_scale", expert_scale_E, spec.per_expert_scale),
    ):
        if wanted != (tensor is not None):
            raise ValueError(f"spec.{name} is {wanted} but the tensor is {'missing' if tensor is None else 'given'}")
        if tensor is not None and tensor.shape != (spec.num_logits,):
            raise ValueError(f"the tensor of {name} must be [{spec.num_logits}], got {list(tensor.shape)}")
    if store is None:
        return
    pool = store.pool_SLK
    if pool.dtype not in (torch.uint8, torch.int16) or (pool.dtype == torch.uint8 and spec.num_logits > 256):
        raise ValueError(f"{spec.num_logits} experts do not fit a route pool of {pool.dtype}; use uint8 or int16")
    if pool.dim() != 3 or not 0 <= store.column < pool.shape[1] or pool.shape[2] < spec.top_k:
        raise ValueError(f"column {store.column} with top_k {spec.top_k} is outside the route pool {list(pool.shape)}")
    if store.slots_T.shape != shape[:1]:
        raise ValueError(f"{shape[0]} tokens need {shape[0]} slots, got {list(store.slots_T.shape)}")


def select_experts_ref(
    logits_TE: Tensor,
    spec: RouterSpec,
    *,
    bias_E: Tensor | None = None,
    expert_scale_E: Tensor | None = None,
    store: RouteStore | None = None,
    num_tokens_1: Tensor | None = None,
) -> Routing:
    """The torch reference of `select_experts`: same arguments, same result."""
    model_dtype = logits_TE.dtype
    logits_TE = torch.nan_to_num(logits_TE, nan=NEG_INF, neginf=NEG_INF)  # +inf becomes the largest finite value
    raw_TE = logits_TE.float()
    if spec.score_dtype == "float32":
        logits_TE = raw_TE
    if spec.softcap is not None:
        logits_TE = spec.softcap * torch.tanh(logits_TE / spec.softcap)
    if spec.score == "sparsemixer":
        ids_TK, weights_TK = _sparsemixer(logits_TE.float(), spec.jitter)
    else:
        score_TE = logits_TE if spec.after_topk else _score(logits_TE, spec.score, exact=not chooses_on_logits(spec))
        choice_TE = raw_TE if chooses_on_logits(spec) else score_TE.float()
        if bias_E is not None:
            choice_TE = torch.nan_to_num(choice_TE + bias_E.float(), nan=NEG_INF, posinf=FLOAT_MAX, neginf=NEG_INF)
        if spec.num_groups > 1:
            keep_TE = _kept_groups(choice_TE, spec)
            choice_TE = choice_TE.masked_fill(~keep_TE, masked_choice(spec))
            # DeepSeek-V2 masks with 0.0 and weighs by what is left; all others weigh by the unmasked score.
            score_TE = score_TE.masked_fill(~keep_TE, 0.0) if spec.group_mask == 0.0 else score_TE
        ids_TK = _descending(choice_TE)[:, : spec.top_k]
        weights_TK = score_TE.gather(1, ids_TK)
        if spec.after_topk:
            weights_TK = _score(weights_TK, spec.score)
    weights_TK = finish_weights(weights_TK.float(), ids_TK, spec, expert_scale_E)
    if spec.weights_dtype == "model":
        weights_TK = weights_TK.to(model_dtype).float()
    return _recorded(ids_TK, weights_TK, store, num_tokens_1)


def select_given(
    logits_TE: Tensor,
    ids_TK: Tensor,
    spec: RouterSpec,
    *,
    store: RouteStore | None = None,
    num_tokens_1: Tensor | None = None,
) -> Routing:
    """A Routing for experts that were chosen without scores (a hash table): weights are the given ids' live scores."""
    score_TE = _score(torch.nan_to_num(logits_TE.float(), nan=NEG_INF, neginf=NEG_INF), spec.score)
    weights_TK = finish_weights(score_TE.gather(1, ids_TK.long()), ids_TK, spec)
    return _recorded(ids_TK, weights_TK, store, num_tokens_1)


def _recorded(ids_TK: Tensor, weights_TK: Tensor, store: RouteStore | None, num_tokens_1: Tensor | None) -> Routing:
    """Write ids to the pool (torch path), mask padding, and make the Routing."""
    if store is not None:
        store.pool_SLK[store.slots_T.long(), store.column, : ids_TK.shape[1]] = ids_TK.to(store.pool_SLK.dtype)
    ids_TK = ids_TK.to(torch.int32)
    if num_tokens_1 is not None:
        padding_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None] >= num_tokens_1
        ids_TK, weights_TK = ids_TK.masked_fill(padding_T1, -1), weights_TK.masked_fill(padding_T1, 0.0)
    return Routing(ids_TK, weights_TK)


def chooses_on_logits(spec: RouterSpec) -> bool:
    """Whether the order of the raw logits is the order of the choice scores (see the module docstring)."""
    by_max = spec.num_groups == 1 or spec.group_score == "max"
    return spec.after_topk or (not spec.choice_bias and by_max)


def masked_choice(spec: RouterSpec) -> float:
    """The choice score of an expert in a dropped group: below every score where the logits choose."""
    return NEG_INF if chooses_on_logits(spec) and spec.score != "none" else spec.group_mask


def finish_weights(
    weights_TK: Tensor, ids_TK: Tensor, spec: RouterSpec, expert_scale_E: Tensor | None = None
) -> Tensor:
    """Renormalise and scale the chosen experts' scores (float32 [T, K]); differentiable, also used by replay."""
    if spec.renormalize:
        total = weights_TK.sum(-1, keepdim=True) if spec.renorm_p == 1 else weights_TK.norm(spec.renorm_p, -1, True)
        total = (total + spec.renorm_eps).clamp(min=spec.renorm_min)
        # A row whose chosen scores all underflow has sum 0: share it equally instead of dividing 0 by 0.
        weights_TK = torch.where(total > 0, weights_TK / total.clamp(min=1e-38), 1.0 / spec.top_k)
    if expert_scale_E is not None:
        weights_TK = weights_TK * expert_scale_E.float()[ids_TK.long()]
    return weights_TK if spec.scale_output else weights_TK * spec.scale


def _score(logits: Tensor, score: str, exact: bool = False) -> Tensor:
    """The scores in the logits' dtype; `exact`: formed in float64, then rounded to float32 and to that dtype."""
    if exact:
        return _score(logits.double(), score).float().to(logits.dtype)
    match score:
        case "softmax":
            # A row without any finite logit (padding, NaN) would give NaN; it becomes uniform.
            dead = logits.amax(-1, keepdim=True) == NEG_INF
            return torch.where(dead, torch.zeros_like(logits), logits).softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrt_softplus":
            return F.softplus(logits).sqrt()
        case "none":
            return logits
    raise ValueError(f"unknown score {score!r}")


def _descending(x: Tensor) -> Tensor:
    """Indices that sort the last axis downwards, ties to the lower index."""
    return torch.argsort(x, dim=-1, descending=True, stable=True)


def _kept_groups(choice_TE: Tensor, spec: RouterSpec) -> Tensor:
    """bool [T, E]: experts whose group is among the best topk_groups by its maximum or the sum of its top 2."""
    choice_TGE = choice_TE.unflatten(1, (spec.num_groups, -1))
    best = 1 if spec.group_score == "max" else 2
    group_TG = choice_TGE.topk(best, -1).values.sum(-1)
    keep_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    keep_TG.scatter_(1, _descending(group_TG)[:, : spec.topk_groups], True)
    return keep_TG[..., None].expand_as(choice_TGE).flatten(1)


def _sparsemixer(logits_TE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """PhiMoE's rule (SparseMixer, arXiv 2310.00811): two softmaxes, each over the experts near its maximum."""
    ids_TK = _descending(logits_TE)[:, :2]
    weights, remaining_TE = [], logits_TE
    for k in range(2):
        id_T1 = ids_TK[:, k : k + 1]
        best_T1 = logits_TE.gather(1, id_T1)
        far_TE = (best_T1 - logits_TE) / torch.maximum(logits_TE.abs(), best_T1) > 2 * jitter
        kept_TE = remaining_TE.masked_fill(far_TE, NEG_INF)
        weights.append(_score(kept_TE, "softmax").gather(1, id_T1))
        remaining_TE = remaining_TE.scatter(1, id_T1, NEG_INF)
    return ids_TK, torch.cat(weights, 1)
