"""Compile Triton kernels in many processes before they are timed, without touching the GPU.

Hundreds of configurations would spend minutes in the compiler on one core. Here forked children stand in for the
driver (the target's name is all that compiling needs) and fill Triton's disk cache; timing then only loads.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any


class _DriverStandIn:
    """The part of Triton's driver that compiling asks for."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def compile_only(capability: int, modules: Sequence[Any]) -> None:
    """From here on this process's launches compile and return; `modules` are told what the capability has."""
    import triton.compiler.compiler as compiler
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_DriverStandIn(capability))
    compiler.CompiledKernel._init_handles = lambda self: None
    launch = JITFunction.run
    JITFunction.run = lambda self, *a, grid, warmup, **k: launch(self, *a, grid=grid, warmup=True, **k)
    for module in modules:
        module.has_pdl = lambda device: capability >= 90


def compile_ahead(
    jobs: Sequence[Callable[[], Any]],
    modules: Sequence[Any],
    *,
    capability: int,
    deadline: float,
    processes: int | None = None,
) -> list[bool]:
    """Run `jobs` (launches over CPU tensors) in forked children that only compile; which of them were compiled.

    Call before CUDA is initialised. Children that are still at work at `deadline` (time.monotonic) are stopped.
    """
    context = multiprocessing.get_context("fork")
    taken, done = context.Value("i", 0), context.Array("b", len(jobs))

    def work() -> None:
        import torch
        from triton.errors import TritonError

        torch.set_num_threads(1)  # as many processes as cores are at work
        compile_only(capability, modules)
        while time.monotonic() < deadline:
            with taken.get_lock():
                mine, taken.value = taken.value, taken.value + 1
            if mine >= len(jobs):
                return
            try:
                jobs[mine]()
                done[mine] = 1
            except (
                TritonError,
                RuntimeError,
                ValueError,
                AssertionError,
            ) as error:  # a schedule this target can not have
                print(f"does not compile: {type(error).__name__}: {str(error)[:200]}", flush=True)

    children = [context.Process(target=work, daemon=True) for _ in range(processes or os.cpu_count() or 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(max(0.1, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
    return [bool(flag) for flag in done]
