"""The reference pass: a Hugging Face model's own choice scores for a token sequence, layer by layer.

One difference must not cascade: a recorded set that is the reference's own up to a near tie is forced, so that the next
layers see the hidden states that the engine saw; a set that is wrong is not forced, so that the next layers are judged
on the model's own hidden states. Each layer is decided while it runs, in one forward.

T tokens, E experts (zero experts included), K chosen. Needs torch and transformers.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tracklayer.audit.compare import Observed
from tracklayer.audit.scores import TIE_SIGMAS, Array, GroupRule, ReferenceScores, noise_of
from tracklayer.errors import UserError
from tracklayer.replay.hf import Replay, route_shape

# Matrix products by which a gate may form its logits.
PRODUCTS = (torch.nn.functional.linear, torch.matmul, torch.mm, torch.addmm, Tensor.matmul, Tensor.__matmul__)
MASKING = (torch.masked_fill, Tensor.masked_fill)
GROUP_SCORE: dict[str, Literal["max", "top2"]] = {
    "deepseek_v2": "max"
}  # by model type; the others take the sum of a group's two best

# Score functions in numpy with their slope, to tell how far noise in the logits moves the choice score.
SCORES: dict[str, Any] = {
    "none": (lambda x: x, lambda s, x: np.ones_like(x)),
    "softmax": (
        lambda x: np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True),
        lambda s, x: s * (1 - s),
    ),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda s, x: s * (1 - s)),
    "sqrt_softplus": (
        lambda x: np.sqrt(np.logaddexp(0, x)),
        lambda s, x: 1 / ((1 + np.exp(-x)) * np.maximum(2 * s, 1e-6)),
    ),
}


def reference_scores(
    model: torch.nn.Module,
    token_ids: Array,
    observed: Observed | None,
    *,
    noise_dtype: str = "bfloat16",
    noise_factor: float = 1.0,
    tie_sigmas: float = TIE_SIGMAS,
    name: str = "reference",
) -> ReferenceScores:
    """Run `model` on one sequence (int [T]) and give its choice scores, guided by `observed` (None: a free run).

    noise_dtype   number type in which the engine ran; noise_factor multiplies the noise assumed for it
    Raises UserError for an empty sequence, an id outside the vocabulary, or a model without routers.
    """
    token_ids = np.asarray(token_ids)
    vocabulary = model.get_input_embeddings().num_embeddings
    if token_ids.ndim != 1 or not len(token_ids) or token_ids.dtype.kind not in "iu":
        raise UserError(
            f"token ids must be a non-empty list of integers, got {token_ids.dtype} {list(token_ids.shape)}"
        )
    if token_ids.min() < 0 or token_ids.max() >= vocabulary:
        bad = int(token_ids.max() if token_ids.max() >= vocabulary else token_ids.min())
        raise UserError(f"token id {bad} is outside the model's vocabulary of {vocabulary}: another model's tokens?")
    guided = _Guided(model, observed, noise_dtype, noise_factor, tie_sigmas)
    device = next(model.parameters()).device
    with torch.no_grad(), guided.running():
        model(input_ids=torch.tensor(token_ids[None].astype(np.int64), device=device), use_cache=False)
    return guided.result(name)


class _Watch(TorchFunctionMode):
    """Keeps the newest [T, E] logits and the newest scores [T, E] before a group mask, whatever router forms them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.logits_TE: Tensor | None = None
        self.unmasked_TE: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS and result.shape[-1] == self.num_experts and result.is_floating_point():
            self.logits_TE, self.unmasked_TE = result.flatten(0, -2), None
        elif func in MASKING and args[0].dim() == 2 and args[0].shape[1] == self.num_experts:
            self.unmasked_TE = args[0]
        return result


class _Guided(Replay):
    """Replay that forces a recorded row only where the live scores allow it, and keeps the scores of every layer."""

    def __init__(
        self,
        model: torch.nn.Module,
        observed: Observed | None,
        noise_dtype: str,
        noise_factor: float,
        tie_sigmas: float,
    ) -> None:
        super().__init__(model, None, observe=True)
        self.shape = route_shape(model)
        self.recorded = observed
        self.noise = (noise_dtype, noise_factor)
        self.tie_sigmas = tie_sigmas
        self.watch = _Watch(self.shape.num_experts)
        self.layers: dict[int, ReferenceScores] = {}
        self.chosen: dict[int, Tensor] = {}
        self.groups = _group_rule(model.config.get_text_config())

    def running(self) -> ExitStack:
        """The model with its routers guided, for one forward."""
        stack = ExitStack()
        stack.enter_context(self.watch)
        stack.enter_context(self._active())
        return stack

    def force(self, layer: int, live_NK: Tensor, columns: slice = slice(None)) -> Tensor:
        if columns == slice(None):
            self.chosen[layer] = self._decide(layer, live_NK)
        return self.chosen[layer][:, columns]

    def _decide(self, layer: int, live_TK: Tensor) -> Tensor:
        scores = self._scores(layer, live_TK)
        self.layers[layer] = scores
        if self.recorded is None:
            return live_TK
        column = self.shape.layer_ids.index(layer)
        ids_RK = self.recorded.ids_TLK[:, column, : self.shape.top_k].astype(np.int64)
        position_R = np.arange(len(ids_RK)) + self.recorded.start
        fits_R = scores.deficit(ids_RK, position_R, np.zeros_like(position_R)) <= self.tie_sigmas
        chosen_TK = live_TK.clone()
        at = torch.tensor(position_R[fits_R], device=live_TK.device)
        chosen_TK[at] = torch.tensor(ids_RK[fits_R], device=live_TK.device, dtype=live_TK.dtype)
        return chosen_TK

    def _scores(self, layer: int, live_TK: Tensor) -> ReferenceScores:
        """This layer's choice scores, as ReferenceScores of one column."""
        seen_TE = self.observed[layer].scores_NE
        dtype, factor = self.noise
        if seen_TE is None:  # experts by token id: no score, and no noise that could move the choice
            choice_TE = torch.zeros(len(live_TK), self.shape.num_experts).scatter(1, live_TK.cpu().long(), 1.0).numpy()
            return _column(choice_TE, np.full(len(live_TK), 1e-6, np.float32), layer, self.shape.top_k, None)
        groups = None
        if self.groups and self.watch.unmasked_TE is not None:
            seen_TE, groups = self.watch.unmasked_TE, self.groups
        choice_TE = _finite(_numpy(seen_TE))
        logits_TE = choice_TE if self.watch.logits_TE is None else _numpy(self.watch.logits_TE)
        slope_T = slope_at_threshold(logits_TE, choice_TE, self.shape.top_k)
        return _column(choice_TE, noise_of(logits_TE, slope_T, dtype, factor), layer, self.shape.top_k, groups)

    def result(self, name: str) -> ReferenceScores:
        self._check_used()
        parts = [self.layers[layer] for layer in self.shape.layer_ids]
        rules = {p.groups for p in parts}
        return ReferenceScores(
            np.concatenate([p.choice_TLE for p in parts], 1),
            np.concatenate([p.noise_TL for p in parts], 1),
            self.shape.layer_ids,
            self.shape.top_k,
            rules.pop() if len(rules) == 1 else None,
            name,
        )


def slope_at_threshold(logits_TE: Array, choice_TE: Array, top_k: int) -> Array:
    """float32 [T]: the largest d choice / d logit among the experts near the threshold of each token.

    Which score function the router used is told by the data: choice - f(logits) must be the same for all tokens (the
    expert's bias).
    """
    floor_T1 = choice_TE.min(-1, keepdims=True)
    finite_TE = (choice_TE > floor_T1) & (choice_TE != 0.0)  # not masked: dropped groups stand at the floor, or at 0

    def misfit(f: Any) -> float:
        rest_TE = np.where(finite_TE, choice_TE - f(logits_TE.astype(np.float64)), np.nan)
        bias_E = np.nanmedian(rest_TE, axis=0)
        return float(np.nanmean(np.abs(rest_TE - bias_E)) + 1e-3 * np.nanmean(np.abs(bias_E)))

    function, slope = min(SCORES.values(), key=lambda pair: misfit(pair[0]))
    near = np.argsort(-choice_TE, axis=-1)[:, : top_k + 4]
    logits = logits_TE.astype(np.float64)
    slopes_TE = slope(function(logits), logits)
    return np.take_along_axis(slopes_TE, near, -1).max(-1).astype(np.float32)


def _group_rule(config: Any) -> GroupRule | None:
    """The family's group limit, None where it has none (one group, or all groups kept)."""
    groups = next((n for name in ("n_group", "num_expert_group") if (n := getattr(config, name, None))), 1)
    keep = getattr(config, "topk_group", None) or 1
    return GroupRule(groups, keep, GROUP_SCORE.get(config.model_type, "top2")) if groups > keep else None


def _finite(choice_TE: Array) -> Array:
    """-inf (an expert that may not be chosen) as a score far below all others; NaN and +inf stay, to be refused."""
    masked_TE = np.isneginf(choice_TE)
    if not masked_TE.any():
        return choice_TE
    seen = choice_TE[~masked_TE]
    return np.where(masked_TE, seen.min() - 1e3 * max(float(np.ptp(seen)), 1.0), choice_TE)


def _column(choice_TE: Array, noise_T: Array, layer: int, top_k: int, groups: GroupRule | None) -> ReferenceScores:
    return ReferenceScores(choice_TE[:, None].astype(np.float32), noise_T[:, None], (layer,), top_k, groups)


def _numpy(x: Tensor) -> Array:
    return x.detach().float().cpu().numpy()
