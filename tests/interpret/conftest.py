"""Run Triton kernels on the CPU, in Triton's interpreter.

The variable must be set before Triton is imported, and would change every kernel of the process: so the tests here run
in a process of their own, `pytest tests/interpret` by hand or started by tests/test_interpret.py in a whole run.
"""

from __future__ import annotations

import importlib.util
import os
import sys

if any("interpret" in argument for argument in sys.argv) and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_for_numpy_2_4(tensor, scope):
        """NumPy 2.4 no longer turns arrays of one element into integers; Triton 3.6's range() relies on it."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_for_numpy_2_4
