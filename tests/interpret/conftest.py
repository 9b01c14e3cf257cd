"""Run Triton kernels on the CPU: the variable must be set before Triton is imported.

pytest loads this file before the test modules beside it; in a process that already imported Triton compiled
(a run of the whole suite), the tests here are skipped, `make test` runs this folder in a process of its own.
"""

from __future__ import annotations

import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_for_numpy_2_4(tensor, scope):
    """NumPy 2.4 no longer turns one-element arrays into integers; Triton 3.6's interpreter relies on it in range()."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_for_numpy_2_4
collect_ignore_glob = [] if triton.knobs.runtime.interpret else ["test_*.py"]
