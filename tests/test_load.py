"""Which device an engine takes."""

from __future__ import annotations

import pytest
import torch

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
