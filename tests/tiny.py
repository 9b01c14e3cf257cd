"""Tiny random checkpoints: built by transformers, or by a plain model where it has no class; rows in tiny_variants."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from reference_models.checkpoints import MODELS
from safetensors.torch import load_file, save_file
from tiny_mixers import MIXERS
from tiny_variants import COMMON
from tiny_variants import VARIANTS as BUILT
from tiny_windows import WINDOWED

VARIANTS: dict[str, Any] = BUILT | WINDOWED | MIXERS | MODELS


def build(variant: str, seed: int = 0, **overrides: Any) -> Any:
    """A float32 model of the variant with random weights: norms and biases too, so that no term hides."""
    if variant in MODELS:
        return MODELS[variant](seed, **overrides)
    config_class, model_class, differences = VARIANTS[variant]
    settings = {key: value for key, value in {**COMMON, **differences, **overrides}.items() if value is not ...}
    config = getattr(transformers, config_class)(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval().float()
    if not hasattr(model, "lm_head"):
        model = WithHead(model)
    from_one = ("Step", "Qwen3Next", "Qwen3_5")  # norm weights are 1 + w
    randomize(model, seed, norm_centre=0.0 if model_class.startswith(from_one) else 1.0)
    return model


def randomize(model: torch.nn.Module, seed: int, norm_centre: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):  # experts by token id: any, but each once a row
                experts = model.config.n_routed_experts
                tensor.copy_(torch.rand(len(tensor), experts, generator=generator).argsort(-1)[:, : tensor.shape[1]])
            if not tensor.is_floating_point() or "inv_freq" in name or "embed_scale" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() >= 2:
                tensor.copy_(noise * (1.5 / tensor.shape[-1] ** 0.5))
            else:
                centre = 1.0 if "linear_attn.norm" in name else norm_centre
                tensor.copy_((centre if "norm" in name and "bias" not in name else 0.0) + 0.2 * noise)


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
    if variant in MODELS or variant in HUB_FORMS:
        if variant in MODELS:
            tensors, config = model.tensors, model.config
        else:
            tensors, config = HUB_FORMS[variant](dict(model.state_dict()), {**VARIANTS[variant][2], **overrides})
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**SPECIAL, **config}))
    else:
        model.save_pretrained(folder)
    return model


Form = tuple[dict[str, torch.Tensor], dict[str, Any]]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """What the checkpoint in `folder` holds."""
    return load_file(folder / "model.safetensors")


def step_form(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Form:
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
    config = {renamed.get(key, key): value for key, value in {**COMMON, **config}.items()}
    config |= {"architectures": ["Step3p5ForCausalLM"], "moe_top_k": config.pop("num_experts_per_tok")}
    return out, config


def ling_form(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Form:
    """Ling-2.0 out of the same model as GLM-4-MoE: q, k and v fused, other names."""
    names = {
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "model.embed_tokens": "model.word_embeddings",
        "gate.e_score_correction_bias": "gate.expert_bias",
    }
    out = {}
    for name, tensor in tensors.items():
        if re.search(r"[kv]_proj", name):
            continue
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if name.endswith("self_attn.q_proj.weight"):
            whole = [tensors[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            name, tensor = name.replace("self_attn.q_proj", "attention.query_key_value"), torch.cat(whole)
        base, stacked, _ = name.partition(".experts.")
        for j, expert in enumerate(tensor if stacked else ()):
            if name.endswith("gate_up_proj"):
                gate, up = expert.chunk(2)
                out |= {f"{base}.experts.{j}.gate_proj.weight": gate, f"{base}.experts.{j}.up_proj.weight": up}
            else:
                out[f"{base}.experts.{j}.down_proj.weight"] = expert
        if not stacked:
            out[name] = tensor
    renamed = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    config = {renamed.get(key, key): value for key, value in {**COMMON, **config}.items()}
    return out, {**config, "architectures": ["BailingMoeV2ForCausalLM"], "rms_norm_eps": 1e-5}


def v4_form(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Form:
    """DeepSeek-V4's published form: experts one by one, short names without a prefix, an MTP layer beside."""
    names = {
        r"^model\.": "",
        r"^embed_tokens|^lm_head": lambda found: {"embed_tokens": "embed", "lm_head": "head"}[found[0]],
        r"\bself_attn\b": "attn",
        r"\bmlp\b": "ffn",
        r"input_layernorm": "attn_norm",
        r"post_attention_layernorm": "ffn_norm",
        r"(attn|ffn)_hc\.": r"hc_\1_",
        r"hc_head\.hc_": "hc_head_",
        r"compressor\.indexer\.scorer\.weights_proj": "indexer.weights_proj",
        r"compressor\.indexer\.q_b_proj": "indexer.wq_b",
        r"compressor\.indexer\.": "indexer.compressor.",
        r"compressor\.kv_norm": "compressor.norm",
        r"position_bias": "ape",
        r"q_a_norm": "q_norm",
        r"sinks": "attn_sink",
        r"attn\.(q_a|q_b|kv|o_a|o_b)_proj": r"attn.w\1",
        r"compressor\.(kv|gate)_proj": r"compressor.w\1",
        r"e_score_correction_bias": "bias",
        r"shared_experts\.gate_proj": "shared_experts.w1",
        r"shared_experts\.up_proj": "shared_experts.w3",
        r"shared_experts\.down_proj": "shared_experts.w2",
    }
    out = {"mtp.0.norm.weight": torch.ones(4)}
    for name, tensor in tensors.items():
        for theirs, published in names.items():
            name = re.sub(theirs, published, name)
        base, found, part = name.partition("ffn.experts.")
        for j, expert in enumerate(tensor if found else ()):
            pieces = zip(("w1", "w3"), expert.chunk(2), strict=True) if part == "gate_up_proj" else [("w2", expert)]
            out |= {f"{base}ffn.experts.{j}.{w}.weight": piece for w, piece in pieces}
        if not found:
            out[name] = tensor
    return out, {**COMMON, **config, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}


SPECIAL = {key: COMMON[key] for key in ("eos_token_id", "bos_token_id", "pad_token_id")}
HUB_FORMS = {"step3p5": step_form, "bailing_moe_v2": ling_form, "deepseek_v4_published": v4_form}
