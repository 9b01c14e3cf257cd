"""Every kernel beside the experts on a GPU, at the sizes that it serves, with fresh random inputs."""

from __future__ import annotations

from dataclasses import replace

import kernel_checks as checks
import pytest
import torch
import torch.nn.functional as F
from attention_cases import BLOCKS, DECODE, MIXED, Case, build, error, exact

from tracklayer.kernels import attention_hopper
from tracklayer.kernels.attention import paged_attention, paged_attention_ref
from tracklayer.kernels.attention_rule import Rule

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("case", DECODE + MIXED + BLOCKS, ids=str)
@pytest.mark.parametrize("dtype,bound", [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_attention_small(case, dtype, bound):
    tensors, keywords = build(case, dtype, "cuda")
    assert error(paged_attention(*tensors, **keywords), exact(*tensors, **keywords)) < bound


LARGE = [
    Case([1] * 7, [1, 640, 400, 4097, 1280, 33, 64], 32, 4, 128, 128),
    Case([1] * 40, [400 + 7 * i for i in range(40)], 32, 4, 128, 128),
    Case([1] * 3, [900, 300, 1], 64, 8, 64, 64, options={"window": 128, "sinks_N": True}),
    Case([1] * 3, [900, 300, 70], 16, 1, 576, 512),
    Case([1] * 3, [900, 300, 70], 128, 1, 576, 512),
    Case([1] * 3, [900, 300, 70], 16, 16, 192, 128),
    Case([700, 1, 333], [700, 512, 1333], 32, 4, 128, 128),
    Case([700, 1, 333], [700, 512, 1333], 64, 8, 64, 64, options={"window": 128, "sinks_N": True}),
    Case([200, 1, 133], [200, 512, 633], 16, 16, 192, 128),
    Case([200, 1, 133], [200, 512, 633], 16, 1, 576, 512),
    Case([200, 1, 133], [200, 512, 633], 40, 8, 256, 256, options={"softcap": 30.0}),
]


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_attention_large(case):
    tensors, keywords = build(case, torch.bfloat16, "cuda", seed=int(torch.randint(1 << 30, (1,))))
    keywords["rule"] = replace(keywords["rule"], scale=case.width**-0.5)
    want = paged_attention_ref(*(x.float() for x in tensors), **keywords)
    assert error(paged_attention(*tensors, **keywords), want.double().cpu().numpy()) < 1e-2


def test_fresh_prompts_and_decodes_apart():
    """Sequences that begin in the step are read from it, decodes served apart: all agree with the paged reference."""
    case = Case([1, 700, 1024, 40], [90, 700, 1024, 2000], 32, 4, 128, 128)
    (q, k, v), keywords = build(case, torch.bfloat16, "cuda")
    want = paged_attention_ref(q.float(), k.float(), v.float(), **keywords).double().cpu().numpy()
    tables = [keywords["slot_table_RC"][row].long() for row in keywords["rows_B"]]
    slots = torch.cat([t[n - c : n] for t, n, c in zip(tables, case.lens, case.counts, strict=True)])
    fresh = tuple(
        torch.tensor(lens, dtype=torch.int32, device="cuda") for lens in ([90, -1, -1, 2000], [-1, 700, 1024, -1])
    )
    out = paged_attention(q, k, v, num_decodes=1, step_kv=(k[slots], v[slots]), fresh=fresh, **keywords)
    assert error(out, want) < 1e-2
    tensors, keywords = build(Case([1] * 9 + [300, 1], [77] * 9 + [400, 5], 32, 4, 128, 128), torch.bfloat16, "cuda")
    want = paged_attention_ref(*(x.float() for x in tensors), **keywords).double().cpu().numpy()
    assert error(paged_attention(*tensors, num_decodes=9, **keywords), want) < 1e-2


@pytest.mark.parametrize("heads,kv_heads", [(32, 4), (8, 8), (16, 4), (8, 4)])
@pytest.mark.parametrize("dtype,bound", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_whole_prompts_on_hopper_beside_poison(heads, kv_heads, dtype, bound):
    """Prompts of all lengths around a block's, read out of a wider tensor; others' rows are NaN and stay alone."""
    lens = [17, 300, 1, 0, 129, 128, 5, 1000]
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    tokens, width = sum(lens) + 9, (heads + 2 * kv_heads) * 128
    q, k, v = (
        x.view(tokens, -1, 128)
        for x in torch.randn(tokens, width, dtype=dtype, device="cuda").split(
            [heads * 128, kv_heads * 128, kv_heads * 128], 1
        )
    )
    if not attention_hopper.serves(q, k, v, Rule(0.1)):
        pytest.skip("needs a Hopper GPU")
    others = {1, 6}
    for b in others:
        k[starts[b] : starts[b + 1]] = v[starts[b] : starts[b + 1]] = torch.nan
    k[starts[-1] :] = v[starts[-1] :] = torch.nan
    seen = torch.tensor([-1 if b in others else n for b, n in enumerate(lens)], dtype=torch.int32, device="cuda")
    out = torch.full((tokens, heads, 128), 7.0, dtype=dtype, device="cuda")
    attention_hopper.hopper_attention(q, k, v, Rule(0.1), starts_B1=starts, lens_B=seen, out_TNE=out)
    for b, n in enumerate(lens):
        at = slice(int(starts[b]), int(starts[b]) + n)
        if b in others:
            assert (out[at] == 7).all(), f"sequence {b} is another's"
        elif n:
            own = (x[at].double().transpose(0, 1) for x in (q, k, v))
            want = F.scaled_dot_product_attention(*own, is_causal=True, scale=0.1, enable_gqa=True).transpose(0, 1)
            assert error(out[at], want.cpu().numpy()) < bound, f"sequence {b} of {n} tokens"
    assert (out[starts[-1] :] == 7).all()


def test_decode_in_a_graph_follows_lens():
    """Captured at one length, replayed at others: the grid does not depend on lens."""
    case = Case([1] * 5, [600, 20, 300, 1, 77], 32, 4, 128, 128)
    tensors, keywords = build(case, torch.bfloat16, "cuda")
    keywords["max_len"] = 4096
    paged_attention(*tensors, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*tensors, **keywords)
    for lens in ([600, 20, 300, 1, 77], [5, 1, 299, 0, 64], [128, 19, 64, 1, 65]):
        keywords["lens_B"].copy_(torch.tensor(lens))
        out.fill_(torch.nan)
        graph.replay()
        want = paged_attention_ref(*(x.float() for x in tensors), **keywords)
        assert error(out, want.double().cpu().numpy()) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens,width", [(1, 2048), (257, 2048), (13, 2880), (3, 7168)])
def test_norms_and_activations(dtype, tokens, width):
    checks.check_norms("cuda", dtype, tokens, width)
    checks.check_activations("cuda", dtype, tokens, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", checks.ROPES, ids=str)
def test_rope(dtype, case):
    for tokens in (1, 7, 300):
        checks.check_rope("cuda", dtype, tokens, case)


@pytest.mark.parametrize("layers,chosen,dtype,fill", [(48, 8, torch.uint8, 255), (61, 6, torch.int16, -1)])
def test_rows(layers, chosen, dtype, fill):
    checks.check_rows("cuda", layers, chosen, dtype, fill)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_and_logprobs(dtype):
    checks.check_sample("cuda", 151_936, dtype)
    checks.check_logprobs("cuda", 151_936, dtype)


@pytest.mark.parametrize("tokens,width,outputs", [(1, 2048, 5120), (1, 4096, 2048), (2, 2880, 640), (2, 7168, 517)])
def test_linear(tokens, width, outputs):
    checks.check_linear("cuda", torch.bfloat16, tokens, width, outputs)
