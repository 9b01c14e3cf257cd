"""Each router's weight rule written out plainly: the weights of *given* ids, from the router's input alone.

What replay must equal, computed another way. N tokens, D width, E = 8 experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, EXPERTS = 61, 32, 8
Rule = Callable[[nn.Module, Tensor, Tensor, Any, tuple[Any, ...]], Tensor]


def _over_sum(w_NK: Tensor, eps: float = 0.0) -> Tensor:
    return w_NK / (w_NK.sum(1, keepdim=True) + eps)


def _logits(router: nn.Module, x_ND: Tensor) -> Tensor:
    return x_ND @ router.weight.T


def softmax(normed: bool | None = None) -> Rule:
    def rule(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
        w_NK = torch.exp(F.log_softmax(_logits(router, x_ND), 1)).gather(1, ids_NK)
        return _over_sum(w_NK) if (config.norm_topk_prob if normed is None else normed) else w_NK

    return rule


def sigmoid_bias(scale: str | None = None, eps: float = 1e-20) -> Rule:
    """The bias chooses only: it is not in the weights."""

    def rule(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
        logits_NE = router.gate(x_ND) if hasattr(router, "gate") else _logits(router, x_ND)
        w_NK = _over_sum(1 / (1 + torch.exp(-logits_NE.gather(1, ids_NK))), eps)
        return w_NK * (1.0 if scale is None else getattr(config, scale))

    return rule


def softmax_after(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    logits_NE = _logits(router, x_ND)
    if getattr(router, "bias", None) is not None:
        logits_NE = logits_NE + router.bias
    return torch.softmax(logits_NE.gather(1, ids_NK), 1)


def deepseek_v2(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    return torch.softmax(_logits(router, x_ND), 1).gather(1, ids_NK) * config.routed_scaling_factor


def deepseek_v4(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    score_NK = torch.log1p(torch.exp(_logits(router, x_ND))).sqrt().gather(1, ids_NK)
    return _over_sum(score_NK, 1e-20) * config.routed_scaling_factor


def llama4(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    return torch.sigmoid(_logits(router, x_ND).gather(1, ids_NK))


def dbrx(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    w_NK = torch.softmax(router.layer(x_ND), 1).gather(1, ids_NK)
    return _over_sum(w_NK)


def sparsemixer(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    z_NE = _logits(router, x_ND)
    columns = []
    dropped_NE = torch.zeros_like(z_NE, dtype=torch.bool)
    for k in range(2):
        id_N1 = ids_NK[:, k : k + 1]
        best_N1 = z_NE.gather(1, id_N1)
        far_NE = (best_N1 - z_NE) / torch.maximum(z_NE.abs(), best_N1) > 2 * config.router_jitter_noise
        p_NE = torch.softmax(z_NE.masked_fill(far_NE.detach() | dropped_NE, float("-inf")), 1)
        columns.append(p_NE.gather(1, id_N1))
        dropped_NE = dropped_NE.scatter(1, id_N1, True)
    return torch.cat(columns, 1)


def ernie(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    w_NK = torch.softmax(_logits(router, x_ND), 1).gather(1, ids_NK)
    return w_NK / w_NK.sum(1, keepdim=True).clamp(min=config.moe_norm_min)


def hunyuan(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    return _over_sum(torch.softmax(router.wg(x_ND), 1).gather(1, ids_NK))


def longcat(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    return torch.softmax(router.classifier(x_ND), 1).gather(1, ids_NK) * config.routed_scaling_factor


def lfm2(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    return _over_sum(torch.sigmoid(_logits(router, x_ND)).gather(1, ids_NK), 1e-6) * config.routed_scaling_factor


def gemma4(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    rms_ND = x_ND * torch.rsqrt(x_ND.pow(2).mean(1, keepdim=True) + config.rms_norm_eps)
    logits_NE = router.proj(rms_ND * router.scale * WIDTH**-0.5)
    return _over_sum(torch.softmax(logits_NE, 1).gather(1, ids_NK)) * router.per_expert_scale[ids_NK]


def cohere2(router: nn.Module, x_ND: Tensor, ids_NK: Tensor, config: Any, extra: tuple[Any, ...]) -> Tensor:
    if config.expert_selection_fn == "softmax":
        return torch.softmax(_logits(router, x_ND).gather(1, ids_NK), 1)
    w_NK = torch.sigmoid(_logits(router, x_ND).gather(1, ids_NK))
    return _over_sum(w_NK) if config.norm_topk_prob else w_NK


noaux = sigmoid_bias("routed_scaling_factor")
