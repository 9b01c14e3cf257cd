"""A sum of expert rows that the decoder hands on unmade, to be made with the next norm, gives what the tensor gives."""

from __future__ import annotations

import pytest
import tiny
import torch
from engine_tools import make_core, request, run

from tracklayer.kernels.combine import WeightedSum, combine_ref
from tracklayer.kernels.experts import fused_experts_ref
from tracklayer.kernels.norm import add_rms_norm_ref
from tracklayer.kernels.topk import Routing

# Plain, parallel attention and experts, norms behind, a scale on the stream, two attentions a layer, several streams.
VARIANTS = ["qwen3_moe", "cohere2_moe", "gemma4_moe", "afmoe", "granite_moe", "longcat_flash", "deepseek_v4", "llama4"]
HANDED_ON = {"qwen3_moe", "granite_moe", "llama4"}


def unmade(x_TD, routing, w13_EFD, w2_EDF, spec, **rest) -> WeightedSum:
    """The finished sum as one row a token of weight 1."""
    y_TD = fused_experts_ref(x_TD, routing, w13_EFD, w2_EDF, spec, **rest)
    ids_T1 = torch.zeros(len(x_TD), 1, dtype=torch.int32)
    return WeightedSum(y_TD, Routing(ids_T1, torch.ones(len(x_TD), 1)), x_TD, 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_sum_made_at_once(variant, tmp_path, monkeypatch):
    tiny.save(variant, tmp_path)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]
    requests = [request(str(i), p, tokens=6, return_logprob=True) for i, p in enumerate(prompts)]
    want = run(make_core(tmp_path), requests)
    handed_on = []

    def add_rms_norm(rows, residual_TD, weight_D, eps, offset, scale):
        handed_on.append(len(residual_TD))
        return add_rms_norm_ref(combine_ref(rows), residual_TD, weight_D, eps, offset, scale)

    monkeypatch.setattr("tracklayer.layers.experts.fused_experts", unmade)
    monkeypatch.setattr("tracklayer.kernels.combine.combine", combine_ref)
    monkeypatch.setattr(WeightedSum, "add_rms_norm", add_rms_norm)
    got = run(make_core(tmp_path), requests)
    for rid, one in want.items():
        assert got[rid].tokens == one.tokens and (got[rid].routes == one.routes).all()
    assert bool(handed_on) == (variant in HANDED_ON), handed_on
