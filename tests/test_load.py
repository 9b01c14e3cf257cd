"""Which device an engine takes, and in which precision it forms logits."""

from __future__ import annotations

import pytest
import tiny
import torch
from engine_tools import make_core, prompts, request, run

from tracklayer.config import EngineConfig
from tracklayer.errors import UserError
from tracklayer.runner.load import choose_device
from tracklayer.server.args import parse


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs as far as torch's questions go; the list of what was made current."""
    made = [1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made[-1])
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    return made


def test_the_current_gpu_or_the_one_asked_for(two_gpus):
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:1") and two_gpus == [1]
    assert choose_device("auto", 0) == torch.device("cuda:0") and two_gpus == [1, 0]
    assert choose_device("cpu", 0) == torch.device("cpu")
    with pytest.raises(UserError, match=r"base_gpu_id 2 .* 2 GPUs \(0\.\.1\)"):
        choose_device("cuda", 2)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 3) == torch.device("cpu")
    with pytest.raises(UserError, match="--device cpu"):
        choose_device("cuda")


def test_the_flag():
    assert parse(["m", "--base-gpu-id", "3", "--gpu-id-step", "2"]).engine.base_gpu_id == 3
    with pytest.raises(UserError, match="base_gpu_id"):
        EngineConfig(model_path="m", base_gpu_id=-1)


def test_logits_in_float32(tmp_path):
    """Sixteen-bit weights, products and sums in float32: rounding alone parts it from float64; not so without it."""
    tiny.save("mixtral", tmp_path)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors = []
    for enabled in (True, False):
        core = make_core(tmp_path, dtype="bfloat16", enable_fp32_lm_head=enabled, skip_route_selftest=True)
        with torch.inference_mode():
            got, head = core.model.decoder.logits(hidden), core.model.decoder.head_VD
            errors.append((got.double() - hidden.double() @ head.double().T).abs().max().item())
        assert got.dtype == (torch.float32 if enabled else torch.bfloat16)
        answer = run(core, [request("a", prompts(1)[0], return_logprob=True, top_logprobs_num=3)])["a"]
        assert (
            len(answer.tokens) == 8
            and (answer.output_logprobs.top_logprobs[:, 0] >= answer.output_logprobs.logprobs).all()
        )
    assert errors[0] < 1e-5 < errors[1]
