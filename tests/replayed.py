"""CUDA graphs where there is no CUDA: what a graph holds is run anew, on the same static buffers, at each replay.

Everything but the capture is the engine's own: ladders, padding, buffers, the choice of a graph, what is read of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tracklayer.engine.engine import EngineCore
from tracklayer.runner import graphs, mixed_graphs, runner


class Replayed:
    """Stands for a torch.cuda.CUDAGraph; its output stays at one place."""

    def __init__(self, forward: Callable[[Any], torch.Tensor], size: Any) -> None:
        self.forward, self.size = forward, size
        self.output = forward(size).clone()
        self.count = 0

    def replay(self) -> None:
        self.count += 1
        self.output.copy_(self.forward(self.size))


def capture_each(
    sizes: Sequence[Any], load: Callable[[Any], None], forward: Callable[[Any], torch.Tensor]
) -> dict[Any, tuple[Replayed, torch.Tensor]]:
    found = {}
    for size in reversed(sizes):
        load(size)
        graph = Replayed(forward, size)
        found[size] = (graph, graph.output)
    return found


def with_graphs(core: EngineCore, monkeypatch: Any, largest: int = 8) -> EngineCore:
    """The same engine with a full ladder of such graphs; counts eager forwards in `core.num_eager`."""
    monkeypatch.setattr(graphs, "capture_each", capture_each)
    monkeypatch.setattr(mixed_graphs, "capture_each", capture_each)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (0, 0))
    core.runner.capture_graphs(largest, core.scheduler.config.max_step_tokens)
    core.num_eager, build = 0, runner.build

    def counted(*args: Any) -> Any:
        core.num_eager += args[1] is core.runner.rows
        return build(*args)

    monkeypatch.setattr(runner, "build", counted)
    return core


def replays(core: EngineCore) -> dict[Any, int]:
    """How often each graph of steps with prompts was replayed."""
    assert core.runner.mixed is not None
    return {size: graph.count for size, (graph, _) in core.runner.mixed.graphs.items()}
