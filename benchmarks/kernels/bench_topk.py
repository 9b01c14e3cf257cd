"""Router: gate product, choice, weights and the store of ids into the route pool.

python -m benchmarks.kernels.bench_topk [--json FILE]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from benchmarks.kernels.common import copies_for, report, row, time_us
from tracklayer.kernels.route import gate_logits, route
from tracklayer.kernels.topk import RouterSpec, RouteStore, select_experts, select_experts_ref

NOAUX = {"score": "sigmoid", "choice_bias": True, "renormalize": True, "renorm_eps": 1e-20, "scale": 2.5}
ROUTERS = {
    "qwen3 128 top 8": (RouterSpec(num_experts=128, top_k=8, renormalize=True), 2048),
    "deepseek 256 top 8": (
        RouterSpec(num_experts=256, top_k=8, num_groups=8, topk_groups=4, gate_dtype="float32", **NOAUX),
        7168,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    for name, (spec, width) in ROUTERS.items():
        experts = spec.num_experts
        copies = copies_for(2.0 * experts * width)
        gates = [torch.randn(experts, width, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        bias_E = torch.randn(experts, device="cuda") * 0.1 if spec.choice_bias else None
        for num_tokens in (1, 4, 8, 16, 17, 64, 256, 4096, 16384):
            x_TD = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16)
            pool_SLK = torch.zeros(num_tokens + 1, 48, spec.top_k, device="cuda", dtype=torch.int16)
            slots_T = torch.randperm(num_tokens, device="cuda").int() + 1
            store = RouteStore(pool_SLK, slots_T, 7)
            num_bytes = 2.0 * (experts + num_tokens) * width
            for kind, where in (("", None), (" + store", store)):
                calls = [partial(route, x_TD, gate, spec, bias_E=bias_E, store=where) for gate in gates]
                rows.append(row(f"{name}: {num_tokens} tokens, route{kind}", time_us(calls), num_bytes=num_bytes))
            if num_tokens > 16:
                logits_TE = gate_logits(x_TD, gates[0], None, spec)
                for kind, choose in (("", select_experts), (" in torch", select_experts_ref)):
                    calls = [partial(choose, logits_TE, spec, bias_E=bias_E, store=store)] * 4
                    us = time_us(calls)
                    rows.append(row(f"{name}: {num_tokens} tokens, choice{kind}", us, num_bytes=logits_TE.nbytes))
    report("topk", rows, args.json)


if __name__ == "__main__":
    main()
