"""Tiny random checkpoints: built by transformers, or by a plain reference where it has no class; rows in tiny_variants."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tiny_variants import COMMON, VARIANTS


def build(variant: str, seed: int = 0, **overrides: Any) -> Any:
    """A float32 model of the variant with random weights: norms and biases too, so that no term hides."""
    config_class, model_class, differences = VARIANTS[variant]
    settings = {key: value for key, value in {**COMMON, **differences, **overrides}.items() if value is not ...}
    config = getattr(transformers, config_class)(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval().float()
    if not hasattr(model, "lm_head"):
        model = WithHead(model)
    randomize(model, seed, norm_centre=0.0 if model_class.startswith("Step") else 1.0)  # Step's weights are 1 + w
    return model


def randomize(model: torch.nn.Module, seed: int, norm_centre: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name or "embed_scale" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() >= 2:
                tensor.copy_(noise * (1.5 / tensor.shape[-1] ** 0.5))
            else:
                tensor.copy_((norm_centre if "norm" in name and "bias" not in name else 0.0) + 0.2 * noise)


class WithHead(torch.nn.Module):
    """A model without a language-model head, and one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)

    def forward(self, **inputs: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(**inputs).last_hidden_state))


def save(variant: str, folder: Path, seed: int = 0, **overrides: Any) -> Any:
    """Build and save; returns the model as the reference."""
    model = build(variant, seed, **overrides)
    if variant in HUB_FORMS:
        tensors, config = HUB_FORMS[variant](dict(model.state_dict()), {**VARIANTS[variant][2], **overrides})
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**COMMON, **config}))
    else:
        model.save_pretrained(folder)
    return model


def step_form(
    tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Step's published form: experts stacked per projection below `moe`, config keys of its own."""
    out = {}
    for name, tensor in tensors.items():
        name = re.sub(r"\.mlp\.(gate|experts)\.", r".moe.\1.", name).replace("mlp.shared_experts", "share_expert")
        name = name.replace("moe.gate.e_score_correction_bias", "moe.router_bias")
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            base = name.removesuffix("experts.gate_up_proj")
            out |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        else:
            out[name.replace("moe.experts.down_proj", "moe.down_proj.weight")] = tensor
    renamed = {"num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts"}
    config = {renamed.get(key, key): value for key, value in {**config, "num_key_value_heads": 2}.items()}
    config |= {"architectures": ["Step3p5ForCausalLM"], "moe_top_k": config.pop("num_experts_per_tok")}
    return out, config


HUB_FORMS = {"step3p5": step_form}
