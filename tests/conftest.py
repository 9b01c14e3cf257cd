"""What all tests share: one torch thread each (tests run side by side), and GPU tests only where there is one."""

from __future__ import annotations

import importlib.util
import os

import pytest


def _torch():  # a bare environment runs the tests of routes and the scheduler without torch
    return __import__("torch") if importlib.util.find_spec("torch") else None


def pytest_configure(config: pytest.Config) -> None:
    # The same examples every time where a change is judged; fresh ones on a developer's machine.
    if importlib.util.find_spec("hypothesis"):
        from hypothesis import settings

        settings.register_profile("judge", derandomize=True, deadline=None)
        if os.environ.get("CI"):
            settings.load_profile("judge")
    torch = _torch()
    if torch is not None:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    torch = _torch()
    if torch is not None and torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
