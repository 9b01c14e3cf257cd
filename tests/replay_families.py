"""The tiny models built, run, and replayed: what the replay tests share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from replay_parts import Family
from replay_rules import EXPERTS, VOCAB, WIDTH
from replay_table import FAMILIES as FIRST_FAMILIES
from replay_table_more import MORE_FAMILIES
from torch import Tensor, nn

from tracklayer.replay.hf import replay_routes
from tracklayer.replay.packing import ReplayBatch, Slots, padded_slots
from tracklayer.routes.record import Routes

FAMILIES: dict[str, Family] = {**FIRST_FAMILIES, **MORE_FAMILIES}


def build(name: str, experts: str = "eager") -> nn.Module:
    """The family's tiny model in float32, in eval mode, with every weight and bias random and not zero."""
    family = FAMILIES[name]
    model_class = getattr(transformers, family.model)
    config_class = getattr(transformers, family.config_class) if family.config_class else model_class.config_class
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    if name == "dbrx":  # the class names every size its own way
        common = {"vocab_size": VOCAB, "use_cache": False}
    keys = {**common, **family.config, "attn_implementation": "eager", "experts_implementation": experts}
    model = model_class(config_class(**{k: v for k, v in keys.items() if v is not ...})).eval().float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            leaf = key.rsplit(".", 1)[-1]
            if leaf == "tid2eid":
                rows = [torch.randperm(EXPERTS, generator=generator)[: tensor.shape[1]] for _ in range(len(tensor))]
                tensor.copy_(torch.stack(rows))
            elif not tensor.is_floating_point() or "inv_freq" in key or "norm" in key.lower() or leaf == "layer_scalar":
                continue
            elif "scale" in leaf:
                tensor.copy_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
            elif re.search(r"(router|gate|classifier|wg|layer|proj)\.weight$", key) and tensor.shape[0] in (8, 12):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
            elif "bias" in leaf or tensor.dim() < 2:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * (1.0 if "embed" in key else 0.15))
    return model


TOKENS_BS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
WHOLE = padded_slots(np.ones((2, 7)))
PRESENT = [name for name, family in FAMILIES.items() if hasattr(transformers, family.model)]


def forward(model: nn.Module, tokens: Tensor = TOKENS_BS, **kwargs: Any) -> Tensor:
    return model(input_ids=tokens, **kwargs)[0]


def loss_of(out: Tensor) -> Tensor:
    """A loss that no normalisation makes constant."""
    direction = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return (out @ direction).sum()


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = run()
    loss_of(out).backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def own_routes(model: nn.Module, slots: Slots = WHOLE, tokens: Tensor = TOKENS_BS, **kwargs: Any) -> list[Routes]:
    with replay_routes(model, None, observe=True) as replay, torch.no_grad():
        forward(model, tokens, **kwargs)
    return replay.observed_routes(slots)


def other_routes(routes: list[Routes], seed: int = 0) -> list[Routes]:
    """Random distinct experts, unrelated to the live choice."""
    rng = np.random.default_rng(seed)
    return [
        Routes(np.argsort(rng.random((*r.shape[:2], r.num_experts)), -1)[..., : r.top_k], r.layer_ids, r.num_experts)
        for r in routes
    ]


def replayed(model: nn.Module, batch: ReplayBatch, tokens: Tensor = TOKENS_BS, **kwargs: Any) -> Tensor:
    with replay_routes(model, batch):
        return forward(model, tokens, **kwargs)


def attributes(model: nn.Module) -> list[tuple[str, list[tuple[str, int]]]]:
    """Every instance attribute of every module, by name and identity."""
    return [(path, sorted((k, id(v)) for k, v in m.__dict__.items())) for path, m in model.named_modules()]
