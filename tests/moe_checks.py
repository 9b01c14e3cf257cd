"""Checks of the router and expert kernels that run on any device: in Triton's interpreter and on a GPU."""

from __future__ import annotations

import torch

from tracklayer.kernels.combine import WeightedSum, combine_ref
from tracklayer.kernels.experts import ExpertSpec, activate
from tracklayer.kernels.experts_cuda import fused_experts_triton
from tracklayer.kernels.grouped_gemm import grouped_gemm, grouped_gemm_ref
from tracklayer.kernels.norm import add_rms_norm_ref, as_tensor
from tracklayer.kernels.route import gate_logits
from tracklayer.kernels.route_few import route_few
from tracklayer.kernels.route_sort import route_sort, route_sort_ref
from tracklayer.kernels.select import select_experts_triton
from tracklayer.kernels.topk import RouterSpec, RouteStore, Routing, select_experts_ref

NOAUX = {"score": "sigmoid", "choice_bias": True, "renormalize": True, "renorm_eps": 1e-20, "scale": 2.5}
ROUTERS = {
    "softmax": RouterSpec(num_experts=12, top_k=3),
    "softmax, renormalised, bf16 weights": RouterSpec(num_experts=60, top_k=4, renormalize=True, weights_dtype="model"),
    "noaux": RouterSpec(num_experts=24, top_k=4, num_groups=4, topk_groups=2, **NOAUX),
    "noaux, one group": RouterSpec(num_experts=33, top_k=6, **NOAUX),
    "groups by max": RouterSpec(
        num_experts=20, top_k=3, num_groups=4, topk_groups=2, group_score="max", group_mask=0.0, scale=16.0
    ),
    "groups hold too few": RouterSpec(
        num_experts=20, top_k=7, num_groups=5, topk_groups=1, group_score="max", group_mask=0.0, scale=16.0
    ),
    "softmax with bias": RouterSpec(num_experts=16, top_k=6, choice_bias=True, renormalize=True, renorm_min=1e-12),
    "zero experts": RouterSpec(num_experts=10, num_zero_experts=5, top_k=3, choice_bias=True, scale=6.0),
    "sqrt_softplus": RouterSpec(num_experts=16, top_k=6, score="sqrt_softplus", choice_bias=True, renormalize=True),
    "sparsemixer": RouterSpec(num_experts=16, top_k=2, score="sparsemixer"),
    "softmax after": RouterSpec(num_experts=9, top_k=2, after_topk=True),
    "sigmoid after": RouterSpec(num_experts=16, top_k=1, score="sigmoid", after_topk=True, weight_on_input=True),
    "expert scale": RouterSpec(num_experts=16, top_k=8, renormalize=True, per_expert_scale=True),
    "softcap": RouterSpec(num_experts=8, top_k=2, softcap=30.0),
    "p-norm": RouterSpec(num_experts=16, top_k=4, renormalize=True, renorm_p=2.0),
    "p-norm 3": RouterSpec(num_experts=16, top_k=4, renormalize=True, renorm_p=3.0),
    "bf16 scores": RouterSpec(num_experts=32, top_k=4, score="sigmoid", score_dtype="model", **{"choice_bias": True}),
    "no score": RouterSpec(num_experts=8, top_k=8, score="none"),
    "scale on output": RouterSpec(num_experts=18, top_k=3, scale=3.0, scale_output=True),
}
LARGE_ROUTERS = {
    "768 logits": RouterSpec(num_experts=512, num_zero_experts=256, top_k=12, choice_bias=True, scale=6.0),
    "deepseek": RouterSpec(num_experts=256, top_k=8, num_groups=8, topk_groups=4, **NOAUX),
    "384": RouterSpec(num_experts=384, top_k=8, **NOAUX),
    "qwen3": RouterSpec(num_experts=128, top_k=8, renormalize=True),
}
EXPERTS = {
    "silu": ExpertSpec(),
    "gpt-oss": ExpertSpec(activation="swiglu_oai", clamp_before=1.0),
    "not gated": ExpertSpec(activation="relu2", gated=False, scale=2.0),
    "clamp after, weight on input": ExpertSpec(activation="gelu", clamp_after=0.5, weight_on_input=True),
    "zero experts": ExpertSpec(activation="gelu_tanh", num_zero_experts=3),
}


def awkward_logits(num_tokens: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random rows among rows of NaN, infinities, ties and zeros of both signs."""
    logits_TE = torch.randn(num_tokens, width, generator=generator).mul_(3)
    rows = [
        lambda r: r.fill_(float("nan")),
        lambda r: r.fill_(1.0),
        lambda r: r.fill_(float("-inf")),
        lambda r: r.copy_(torch.arange(width) % 2 * -0.0),
        lambda r: r[width // 2 :].fill_(float("inf")),
        lambda r: r[::2].fill_(float("nan")),
        lambda r: r.copy_((torch.arange(width) % 3).float()),
        lambda r: r.mul_(40),
    ]
    for row, spoil in zip(range(1, num_tokens, 2), rows * num_tokens, strict=False):
        spoil(logits_TE[row])
    return logits_TE.to(dtype)


def check_select(spec: RouterSpec, num_tokens: int, dtype: torch.dtype, device: str, seed: int) -> None:
    """Ids equal the reference's exactly, also in the pool; weights closely; padding rows choose nothing."""
    generator = torch.Generator().manual_seed(seed)
    width = spec.num_logits
    logits_TE = awkward_logits(num_tokens, width, dtype, generator)
    bias_E = torch.randn(width, generator=generator) * 0.1 if spec.choice_bias else None
    scale_E = torch.rand(width, generator=generator) if spec.per_expert_scale else None
    num_real = num_tokens - num_tokens // 3
    results = []
    for choose, where in ((select_experts_ref, "cpu"), (select_experts_triton, device)):
        pool_SLK = torch.full((num_tokens + 5, 3, spec.top_k), 77, dtype=torch.int16, device=where)
        slots_T = (torch.arange(num_tokens, dtype=torch.int32) + 5).flip(0).to(where)
        routing = choose(
            logits_TE.to(where),
            spec,
            bias_E=None if bias_E is None else bias_E.to(where),
            expert_scale_E=None if scale_E is None else scale_E.to(where),
            store=RouteStore(pool_SLK, slots_T, 1),
            num_tokens_1=torch.tensor([num_real], dtype=torch.int32, device=where),
        )
        results.append((routing.ids_TK.cpu(), routing.weights_TK.cpu(), pool_SLK.cpu()))
    (ids, weights, pool), (got_ids, got_weights, got_pool) = results
    assert torch.equal(got_ids, ids)
    assert torch.equal(got_pool, pool)
    assert (got_ids[num_real:] == -1).all() and (got_weights[num_real:] == 0).all()
    stored_TK = got_pool[5:, 1].flip(0).sort(1).values
    assert ((stored_TK >= 0) & (stored_TK < width)).all() and (stored_TK.diff(dim=1) > 0).all(), "K distinct ids"
    assert got_weights.isfinite().all() or not weights.isfinite().all()
    bound = 1e-2 if "model" in (spec.score_dtype, spec.weights_dtype) and dtype != torch.float32 else 2e-6
    torch.testing.assert_close(got_weights, weights, rtol=bound, atol=bound)


def check_route_few(spec: RouterSpec, num_tokens: int, dtype: torch.dtype, device: str, seed: int) -> None:
    """The ids are the reference's choice on float64 logits wherever no two of them nearly tie; repeatable."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(num_tokens, 100, generator=generator).to(dtype).to(device)
    gate_ED = (torch.randn(spec.num_logits, 100, generator=generator) * 0.2).to(dtype).to(device)
    bias_E = (torch.randn(spec.num_logits, generator=generator) * 0.1).to(device) if spec.choice_bias else None
    scale_E = torch.rand(spec.num_logits, generator=generator).to(device) if spec.per_expert_scale else None
    got, again = (route_few(x_TD, gate_ED, spec, bias_E=bias_E, expert_scale_E=scale_E) for _ in range(2))
    assert torch.equal(got.ids_TK, again.ids_TK) and torch.equal(got.weights_TK, again.weights_TK)
    exact_TE = x_TD.double() @ gate_ED.double().t()
    near = 2e-5 if dtype == torch.float32 or spec.gate_dtype == "float32" else 4e-2
    assert (gate_logits(x_TD, gate_ED, None, spec) - exact_TE).abs().max() < near
    rest = {"bias_E": bias_E, "expert_scale_E": scale_E}
    want = select_experts_ref(exact_TE.float(), spec, **rest)
    same_T = (got.ids_TK == want.ids_TK).all(1)
    steady_T = steady(exact_TE, near, spec, **rest)
    assert same_T[steady_T].all(), f"{(steady_T & ~same_T).sum()} of {steady_T.sum()} steady rows differ"
    assert steady_T.float().mean() > 0.9 or near > 1e-3, "too few rows say anything"
    torch.testing.assert_close(got.weights_TK[steady_T], want.weights_TK[steady_T], rtol=5 * near, atol=5 * near)


def steady(exact_TE: torch.Tensor, near: float, spec: RouterSpec, **rest: torch.Tensor | None) -> torch.Tensor:
    """bool [T]: logits moved by as much as rounding may move them (`near`) give the same choice in the same order.

    And about the same weights: sparsemixer's jump where an expert comes within reach of the best.
    """
    generator = torch.Generator().manual_seed(0)
    want = select_experts_ref(exact_TE.float(), spec, **rest)
    steady_T = torch.ones(len(exact_TE), dtype=torch.bool, device=exact_TE.device)
    for _ in range(20):
        noise_TE = torch.randn(exact_TE.shape, generator=generator, dtype=torch.float64).to(exact_TE.device)
        moved = select_experts_ref((exact_TE + near * noise_TE).float(), spec, **rest)
        steady_T &= (moved.ids_TK == want.ids_TK).all(1)
        steady_T &= moved.weights_TK.isclose(want.weights_TK, rtol=5 * near, atol=5 * near).all(1)
    return steady_T


def some_ids(kind: str, num_tokens: int, top_k: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """int32 [T, K] of distinct ids: spread, all to the same experts, or with padding rows."""
    if kind == "all to one":
        return torch.arange(top_k, dtype=torch.int32).expand(num_tokens, top_k).contiguous()
    ids_TK = torch.rand(num_tokens, width, generator=generator).topk(top_k).indices.int()
    if kind == "padded":
        ids_TK[num_tokens // 2 :] = -1
    return ids_TK


def check_sort(ids_TK: torch.Tensor, num_experts: int, block_rows: int, device: str) -> None:
    got, want = (f(ids_TK.to(device), num_experts, block_rows) for f in (route_sort, route_sort_ref))
    num_blocks = int(want.num_blocks_1)
    assert torch.equal(got.starts_E1, want.starts_E1)
    assert torch.equal(got.pairs_P[: len(want.pairs_P)], want.pairs_P)
    assert int(got.num_blocks_1) == num_blocks <= got.blocks_2B.shape[1]
    assert torch.equal(got.blocks_2B[:, :num_blocks], want.blocks_2B)


def experts_float64(x_TD, routing, w13_EFD, w2_EDF, spec, bias13, bias2, add_TD) -> torch.Tensor:
    """The definition, token by token, in float64 on the CPU."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64) if add_TD is None else add_TD.double().cpu()
    x_TD, w13_EFD, w2_EDF = x_TD.double().cpu(), w13_EFD.double().cpu(), w2_EDF.double().cpu()
    for t, (ids, weights) in enumerate(zip(routing.ids_TK.tolist(), routing.weights_TK.double().cpu(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            row = x_TD[t]
            if 0 <= expert < len(w13_EFD):
                inner = w13_EFD[expert] @ (row * weight if spec.weight_on_input else row)
                hidden = activate(inner if bias13 is None else inner + bias13[expert].double().cpu(), spec)
                row = w2_EDF[expert] @ hidden + (0 if bias2 is None else bias2[expert].double().cpu())
                weight = 1.0 if spec.weight_on_input else weight
            if expert >= 0:
                out_TD[t] += spec.scale * weight * row
    return out_TD


def check_experts(
    spec: ExpertSpec, config: dict, kind: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    """Against the definition in float64, with the memory that the kernels are given poisoned by NaN; repeatable."""
    num_tokens, top_k, experts, width, inner = shape
    generator = torch.Generator().manual_seed(num_tokens + width)

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(dtype).to(device)

    x_TD = random(num_tokens + 3, width)
    x_TD[num_tokens:] = float("nan")  # rows beside the batch
    x_TD = x_TD[:num_tokens]
    rows = inner * (2 if spec.gated else 1)
    w13_EFD, w2_EDF = random(experts, rows, width, scale=width**-0.5), random(experts, width, inner, scale=inner**-0.5)
    bias13, bias2, add_TD = (
        random(experts, rows, scale=0.3),
        random(experts, width, scale=0.3),
        random(num_tokens, width),
    )
    ids_TK = some_ids(kind, num_tokens, top_k, experts + spec.num_zero_experts, generator).to(device)
    routing = Routing(ids_TK, torch.rand(num_tokens, top_k, generator=generator).to(device))
    real_empty = torch.empty

    def poisoned(*size, **kwargs):
        out = real_empty(*size, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(-(1 << 30))

    torch.empty = poisoned
    try:
        got, again = (
            as_tensor(
                fused_experts_triton(
                    x_TD, routing, w13_EFD, w2_EDF, spec, bias13=bias13, bias2=bias2, add_TD=add_TD, config=config
                )
            )
            for _ in range(2)
        )
    finally:
        torch.empty = real_empty
    assert torch.equal(got, again)
    want = experts_float64(x_TD, routing, w13_EFD, w2_EDF, spec, bias13, bias2, add_TD)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    error = (got.double().cpu() - want).norm() / want.norm().clamp(min=1e-9)
    assert error < bound, f"relative error {error:.2e}"


def check_combine(dtype: torch.dtype, device: str) -> None:
    """The sum, alone and with the norm of the residual stream behind it; rows without an expert are never read."""
    generator = torch.Generator().manual_seed(1)
    ids_TK = torch.tensor([[0, 1, 6], [-1, -1, -1], [4, -1, 2]], dtype=torch.int32)
    rows_PD = torch.randn(9, 70, generator=generator).to(dtype)
    rows_PD[2:6] = float("nan")
    rows_PD[7] = float("nan")
    x_TD, weights_TK = torch.randn(3, 70, generator=generator).to(dtype), torch.rand(3, 3, generator=generator)
    for zero in (True, False):
        got, want = (
            WeightedSum(rows_PD.to(where), Routing(ids_TK.to(where), weights_TK.to(where)), x_TD.to(where), 5,
                        scale=2.0, zero_experts=zero, add_TD=x_TD.to(where))
            for where in (device, "cpu")
        )  # fmt: skip
        sum_TD = combine_ref(want)
        torch.testing.assert_close(got.tensor().cpu(), sum_TD)
        gain_D, stream_TD = torch.rand(70, generator=generator).to(dtype), torch.randn(3, 140, generator=generator)
        stream_TD = stream_TD.to(dtype)[:, :70]
        moved_TD = stream_TD.to(device, copy=True)
        normed_TD = got.add_rms_norm(moved_TD, gain_D.to(device), 1e-6, 1.0, 0.5)
        torch.testing.assert_close(normed_TD.cpu(), add_rms_norm_ref(sum_TD, stream_TD, gain_D, 1e-6, 1.0, 0.5))
        torch.testing.assert_close(moved_TD.cpu(), stream_TD)


def check_grouped_gemm(config: dict, first: bool, dtype: torch.dtype, device: str) -> None:
    """One product on its own: rows at the right places, biases and activation, rows without an expert unwritten."""
    generator = torch.Generator().manual_seed(5)
    num_tokens, top_k, experts, width, inner = 11, 2, 4, 24, 40
    spec = ExpertSpec(activation="swiglu_oai", clamp_before=1.0)
    ids_TK = some_ids("padded", num_tokens, top_k, experts, generator).to(device)
    weights_TK = torch.rand(num_tokens, top_k, generator=generator).to(device)
    pairs = route_sort(ids_TK, experts, config["m"])
    rows, reduction = (2 * inner, width) if first else (width, inner)
    a = torch.randn(num_tokens if first else num_tokens * top_k, reduction, generator=generator).to(dtype).to(device)
    w_EQR = (torch.randn(experts, rows, reduction, generator=generator) * reduction**-0.5).to(dtype).to(device)
    bias = torch.randn(experts, rows, generator=generator).to(dtype).to(device)
    got = grouped_gemm(a, w_EQR, pairs, weights_TK, spec, config, first=first, bias=bias)
    want = grouped_gemm_ref(a, w_EQR, pairs, weights_TK, spec, first=first, bias=bias)
    written = ~want[:, 0].isnan()
    assert written.sum() == int((ids_TK >= 0).sum())
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert (got[written].double() - want[written]).norm() / want[written].norm() < bound
