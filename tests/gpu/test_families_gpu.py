"""Every family on a GPU: self-test, graphs, and the CPU run's tokens and experts."""

from __future__ import annotations

import pytest
import tiny
import transformers
from parity_gpu import check_on

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_agrees_with_the_cpu(variant, dtype, tmp_path):
    row = tiny.VARIANTS[variant]
    if isinstance(row, tuple) and not hasattr(transformers, row[0]):
        pytest.skip(f"transformers {transformers.__version__} has no {row[0]}")
    agreement, _ = check_on(variant, tmp_path, dtype, {"device": "cuda"})
    assert agreement.ok, agreement
