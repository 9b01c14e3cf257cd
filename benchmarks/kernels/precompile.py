"""Compile Triton kernels in many processes before a sweep, without touching the GPU.

A sweep of hundreds of configurations spends minutes in the compiler on one core. Here forked children stand in for
the driver (the target's name is all that compiling needs) and fill Triton's disk cache; the sweep then only loads.
"""

from __future__ import annotations

import os
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
    """From here on this process's launches compile and return; `modules` are told that the device has PDL."""
    import triton.compiler.compiler as compiler
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_DriverStandIn(capability))
    compiler.CompiledKernel._init_handles = lambda self: None
    launch = JITFunction.run
    JITFunction.run = lambda self, *a, grid, warmup, **k: launch(self, *a, grid=grid, warmup=True, **k)
    for module in modules:
        module.has_pdl = lambda device: True


def compile_ahead(
    jobs: Sequence[Callable[[], Any]], modules: Sequence[Any], *, capability: int = 90, processes: int | None = None
) -> None:
    """Run `jobs` (launches over CPU tensors) in forked children that only compile. Call before CUDA is initialised.

    A job that does not compile is reported and skipped: the sweep meets the same error and leaves it out.
    """
    processes = processes or os.cpu_count() or 1
    children = []
    for part in range(processes):
        pid = os.fork()
        if pid == 0:
            compile_only(capability, modules)
            for job in jobs[part::processes]:
                try:
                    job()
                except Exception as error:
                    print(f"does not compile: {type(error).__name__}: {str(error)[:200]}", flush=True)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
