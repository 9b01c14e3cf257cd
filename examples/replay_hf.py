"""Routing replay in a Hugging Face trainer, from rollout to gradient step, on any MoE checkpoint directory.

    python examples/replay_hf.py MODEL_DIR [--tokens 48] [--rollout-dtype bfloat16]

The engine samples answers and returns their routes; a transformers model in float32 is the trainer. Its
log-probabilities of the sampled tokens are compared with the rollout's: with the experts it would choose itself, with
the recorded ones, and, to see how much experts matter in this model, with wrong ones. A policy-gradient step under
replay, with gradient checkpointing, follows. The last line is one JSON object.
`tracklayer demo-model DIR` makes a small checkpoint to try it on.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import tracklayer
from tracklayer.replay.hf import find_routers, replay_routes
from tracklayer.replay.metrics import logprob_mismatch, route_mismatch
from tracklayer.replay.packing import ReplayBatch, lay_out, padded_slots
from tracklayer.routes.record import Routes

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three animals that live in the sea.",
    "Write one sentence about winter.",
)


def rollout(model_dir: str, tokens: int, dtype: str) -> list[dict[str, Any]]:
    """Sampled answers: token ids of prompt and output, log-probabilities of the output, routes of all but the last."""
    options = {"dtype": dtype, "enable_return_routed_experts": True, "random_seed": 0}
    with tracklayer.Engine(model_path=model_dir, **options) as engine:
        replies = engine.generate(
            messages=[[{"role": "user", "content": question}] for question in QUESTIONS],
            sampling_params={"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,  # brings the prompt's token ids
            return_routed_experts=True,
        )
    samples = []
    for reply in replies:
        meta = reply["meta_info"]
        prompt = [token for _, token, *_ in meta["input_token_logprobs"]]
        samples.append(
            {
                "ids": prompt + reply["output_ids"],
                "prompt": len(prompt),
                "logprobs": [logprob for logprob, *_ in meta["output_token_logprobs"]],
                "routes": meta["routed_experts"],
            }
        )
    return samples


def padded(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [B, S], padded left."""
    width = max(len(s["ids"]) for s in samples)
    ids, mask = torch.zeros(len(samples), width, dtype=torch.long), torch.zeros(len(samples), width, dtype=torch.long)
    for row, s in enumerate(samples):
        ids[row, width - len(s["ids"]) :] = torch.tensor(s["ids"])
        mask[row, width - len(s["ids"]) :] = 1
    return ids, mask


def response_logprobs(model: Any, samples: list[dict[str, Any]], ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Per sample the model's log-probabilities of the sampled tokens."""
    position = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).logits.float()
    every = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return [row[-len(s["logprobs"]) :] for row, s in zip(every, samples, strict=True)]


def with_routes(model: Any, batch: ReplayBatch | None, *call: Any) -> tuple[list[Tensor], list[Routes]]:
    """Log-probabilities under the batch's routes, and what the routers would have chosen themselves."""
    with replay_routes(model, batch, observe=True) as replay:
        logprobs = response_logprobs(model, *call)
    return logprobs, replay.observed_routes(padded_slots(call[2].numpy()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--tokens", type=int, default=48, help="tokens sampled for each question")
    parser.add_argument("--rollout-dtype", default="bfloat16", help="number type of the engine")
    args = parser.parse_args()

    samples = rollout(args.model_dir, args.tokens, args.rollout_dtype)
    for s in samples:
        print(f"{len(s['ids'])} tokens: {s['routes']!r}")
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model_dir, dtype=torch.float32)
    ids, mask = padded(samples)
    batch = lay_out([s["routes"] for s in samples], padded_slots(mask.numpy()))
    sampled = np.concatenate([s["logprobs"] for s in samples])

    result: dict[str, Any] = {"samples": len(samples), "tokens": len(sampled)}
    shifted = [(s["routes"].to("int32") + 1) % batch.num_experts for s in samples]
    wrong = [Routes(ids_TLK, batch.layer_ids, batch.num_experts) for ids_TLK in shifted]
    for name, routes in (("own", None), ("replayed", batch), ("wrong", lay_out(wrong, batch.slots))):
        with torch.no_grad():
            logprobs, observed = with_routes(model, routes, samples, ids, mask)
        result[name] = asdict(logprob_mismatch(sampled, torch.cat(logprobs)))
        if routes is None:
            each = [route_mismatch(s["routes"], o) for s, o in zip(samples, observed, strict=True)]
            result["differing_routers"] = sum(m.router_share * m.rows for m in each) / sum(m.rows for m in each)
        figures = result[name]
        print(f"{name:>8} experts: k3 {figures['k3']:.3e}, largest probability ratio {figures['largest_ratio']:.3f}")

    model.train()
    checkpointing = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    checkpointing({"use_reentrant": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rewards = [1.0 if i % 2 else -1.0 for i in range(len(samples))]  # stands for a reward model
    with replay_routes(model, batch):
        logprobs = response_logprobs(model, samples, ids, mask)
    loss = -sum(r * row.mean() for r, row in zip(rewards, logprobs, strict=True)) / len(samples)
    loss.backward()  # recomputes the layers: with this batch's routes, although the block is left
    largest = [max(float(p.grad.abs().max()) for p in router.module.parameters()) for router in find_routers(model)]
    optimizer.step()
    result["loss"], result["router_gradient"] = loss.item(), [min(largest), max(largest)]
    print(f"one step: loss {loss.item():.4f}, router gradients by layer {min(largest):.2e} to {max(largest):.2e}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
