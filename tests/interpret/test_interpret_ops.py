"""The small kernels in the interpreter."""

from __future__ import annotations

import kernel_checks as checks
import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # integer mixing overflows on purpose


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("tokens,width", [(1, 64), (3, 100)])
def test_norms_and_activations(tokens, width):
    checks.check_norms("cpu", torch.float32, tokens, width)
    checks.check_activations("cpu", torch.float32, tokens, width)


@pytest.mark.parametrize("case", checks.ROPES[:5], ids=str)
def test_rope(case):
    checks.check_rope("cpu", torch.float32, 5, case)


@pytest.mark.parametrize("layers,chosen,dtype,fill", [(5, 3, torch.uint8, 255), (3, 8, torch.int16, -1)])
def test_rows(layers, chosen, dtype, fill):
    checks.check_rows("cpu", layers, chosen, dtype, fill)


def test_sample():
    checks.check_sample("cpu", 5003, torch.float32)


def test_logprobs():
    checks.check_logprobs("cpu", 5003, torch.float32)


@pytest.mark.parametrize("tokens,width", [(1, 64), (3, 100)])
def test_linear(tokens, width):
    checks.check_linear("cpu", torch.float32, tokens, width, 19, rows=4, columns=32)
