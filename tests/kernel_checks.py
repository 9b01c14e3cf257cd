"""Each small kernel against its torch reference, on any device: tiny in the interpreter, larger on a GPU."""

from __future__ import annotations

import torch

from tracklayer.kernels import activation, linear, norm, qk_rope, rope, rows, sample, sample_kernels


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error in the Frobenius norm within the dtype's rounding; never NaN."""
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert float(error) < bound, float(error)


def check_norms(device: str, dtype: torch.dtype, tokens: int, width: int) -> None:
    x, gain, bias = (torch.randn(*shape, device=device).to(dtype) for shape in ((tokens, width), (width,), (width,)))
    close(norm.launch_norm(x, gain, 1e-6, 1.0), norm.rms_norm_ref(x, gain, 1e-6, 1.0), dtype)
    want = norm.layer_norm_ref(x, gain, bias, 1e-5)
    close(norm.launch_norm(x, gain, 1e-5, bias_D=bias, centre=True), want, dtype)
    close(norm.launch_norm(x[:, None], gain, 1e-6), norm.rms_norm_ref(x[:, None], gain, 1e-6), dtype)
    wide = torch.randn(tokens, 2 * width, device=device).to(dtype)  # a part of a wider row, written in place
    want = torch.cat([norm.rms_norm_ref(wide[:, :width], gain, 1e-6), wide[:, width:]], -1)
    norm.launch_norm(wide[:, :width], gain, 1e-6, out_TD=wide[:, :width])
    close(wide, want, dtype)
    residual = torch.randn(tokens, width, device=device).to(dtype)
    again = residual.clone()
    got = norm.launch_norm(x, gain, 1e-6, residual=residual, scale=0.5)
    close(got, norm.add_rms_norm_ref(x, again, gain, 1e-6, 0.0, 0.5), dtype)
    close(residual, again, dtype)


def check_activations(device: str, dtype: torch.dtype, tokens: int, width: int) -> None:
    x = 4 * torch.randn(tokens, 2 * width, device=device).to(dtype)
    for name in activation.ACTIVATIONS:
        for gated in (True, False):
            got = activation.launch_act_mul(x, name, gated=gated)
            close(got, activation.act_mul_ref(x, name, gated=gated), dtype)


ROPES = [  # heads, key heads, width, value width, rope width, interleaved, norm, whole, after
    (6, 2, 32, 32, 32, False, True, False, False),
    (5, 1, 48, 16, 16, True, True, False, True),
    (4, 2, 32, 16, 32, True, False, False, False),
    (4, 2, 20, 16, 0, True, True, True, False),
    (4, 2, 20, 16, 8, False, True, True, False),
    (32, 4, 128, 128, 128, False, True, False, False),
]


def check_rope(device: str, dtype: torch.dtype, tokens: int, case: tuple) -> None:
    heads, kv_heads, width, value_width, rope_dim, interleaved, normed, whole, after = case
    qkv = torch.randn(tokens, heads * width + kv_heads * (width + value_width), device=device).to(dtype)
    table = rope.rope_table(rope_dim, 1e4, None, 64, device) if rope_dim else None
    positions = torch.randint(0, 64, (tokens,), device=device).int()
    slots = (1 + torch.randperm(2 * tokens, device=device)[:tokens]).int()
    gains = [torch.randn(n * width if whole else width, device=device).to(dtype) for n in (heads, kv_heads)]
    cut = qk_rope.Heads(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width, value_dim=value_width, rope_dim=rope_dim,
        interleaved=interleaved, q_norm_D=gains[0] if normed else None, k_norm_D=gains[1] if normed else None,
        norm_offset=0.5, norm_whole=whole, norm_after_rope=after,
    )  # fmt: skip
    results = []
    for run in (qk_rope.launch_qk_rope_store, qk_rope.qk_rope_store_ref):
        k = torch.zeros(2 * tokens + 1, kv_heads, width, device=device, dtype=dtype)
        v = torch.zeros(2 * tokens + 1, kv_heads, value_width, device=device, dtype=dtype)
        x = qkv.clone()
        q = run(x, table, positions, slots, k, v, cut)
        results.append((q, k, v, x))
    for got, want in zip(*results, strict=True):
        close(got, want, dtype)


def check_rows(device: str, layers: int, chosen: int, dtype: torch.dtype, fill: int) -> None:
    pool = torch.randint(0, 100, (50, layers, chosen), device=device).to(dtype)
    slots = torch.tensor([3, 7, 7, 1, 49, 9, 0], device=device, dtype=torch.int32)
    want = pool.clone()
    rows.launch_fill_rows(pool, slots[:3], fill)
    rows.fill_rows_ref(want, slots[:3], fill)
    assert pool.equal(want)
    pool[9, layers - 1] = fill
    pool[1, 0, : chosen - 1] = fill  # one id is written: the row is there
    got, missing = rows.launch_gather_rows(pool, slots, fill)
    want, missing_ref = rows.gather_rows_ref(pool, slots, fill)
    assert got.equal(want) and missing.equal(missing_ref)
    assert missing.tolist() == [3] * (layers - 1) + [4]


def sampling_rows(device: str, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rows with NaN, inf, all -inf, all equal, many ties; each with other settings."""
    logits = 3 * torch.randn(9, vocabulary, device=device)
    logits[0, 5], logits[1, 7], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf, 1.0
    logits[4], logits[6, :100], logits[8, 10:] = logits[4].round(), -0.0, -torch.inf
    settings = dict(
        temperature_N=[0.0, 1, 0.7, 1, 1, 2, 0.5, 1, 1.3],
        top_k_N=[vocabulary, 1 << 30, 5, 7, 40, 1, vocabulary, 1 << 30, 20],
        top_p_N=[1, 1, 0.9, 1, 0.8, 0.5, 0.3, 1, 0.9],
        min_p_N=[0, 0, 0, 0, 0, 0, 0, 0.2, 0.05],
    )
    tensors = {k: torch.tensor(v, device=device, dtype=torch.float32) for k, v in settings.items()}
    tensors["top_k_N"] = tensors["top_k_N"].int()
    tensors["seeds_N"] = torch.randint(-(2**62), 2**62, (9,), device=device)
    tensors["positions_N"] = torch.randint(0, 100_000, (9,), device=device, dtype=torch.int32)
    return logits.to(dtype), tensors


def check_sample(device: str, vocabulary: int, dtype: torch.dtype) -> None:
    logits, settings = sampling_rows(device, vocabulary, dtype)
    for all_greedy, any_filter in ((True, False), (False, False), (False, True)):
        flags = dict(all_greedy=all_greedy, any_filter=any_filter)
        got = sample_kernels.launch_sample(logits, **settings, **flags)
        assert got.tolist() == sample.sample_ref(logits, **settings, **flags).tolist(), flags
        for i in range(len(logits)):  # alone as in the batch
            alone = {k: v[i : i + 1] for k, v in settings.items()}
            assert sample_kernels.launch_sample(logits[i : i + 1], **alone, **flags).tolist() == [int(got[i])]


def check_logprobs(device: str, vocabulary: int, dtype: torch.dtype) -> None:
    logits = 3 * torch.randn(5, vocabulary, device=device).to(dtype)
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0], device=device)
    ids = torch.randint(0, vocabulary, (5,), device=device, dtype=torch.int32)
    got = sample_kernels.launch_logprobs_of(logits, temperature, ids, 3)
    want = sample.logprobs_of_ref(logits, temperature, ids, 3)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[2], want[2], rtol=1e-5, atol=1e-5)
    counts = torch.randint(0, 3, (5, vocabulary), device=device, dtype=torch.int16)
    seen = torch.rand(5, vocabulary, device=device) > 0.5
    factors = [torch.rand(5, device=device) + 0.5 for _ in range(3)]
    got = sample_kernels.launch_apply_penalties(logits, counts, seen, *factors)
    torch.testing.assert_close(got, sample.apply_penalties_ref(logits, counts, seen, *factors))


def check_linear(device: str, dtype: torch.dtype, tokens: int, width: int, outputs: int, **schedule: int) -> None:
    x, weight, bias = (
        torch.randn(*shape, device=device).to(dtype) for shape in ((tokens, width), (outputs, width), (outputs,))
    )
    got = linear.launch_linear_small(x, weight, bias, **schedule)
    close(got, linear.linear_small_ref(x.double(), weight.double(), bias.double()), dtype)
