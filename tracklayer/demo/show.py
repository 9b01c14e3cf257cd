"""The demonstration's table and picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from tracklayer.demo.check import Verdict
from tracklayer.demo.client import Sample

ANSWER_CHARACTERS = 60


def table(samples: list[Sample], verdicts: list[Verdict]) -> Table:
    """One line a sample: what was asked and answered, and what became of its routes."""
    view = Table(title="What was asked, and the experts that came back", show_lines=False)
    for name in ("question", "answer"):
        view.add_column(name, overflow="fold")
    for name in ("prompt", "cached", "output", "route rows", "complete", "agrees"):
        view.add_column(name, justify="right")
    for sample, verdict in zip(samples, verdicts, strict=True):
        notes = [f"sample {sample.index + 1} of {sample.prompt.n}"] if sample.prompt.n > 1 else []
        notes += [f"streamed in {sample.chunks} chunks"] if sample.chunks else []
        note = f" ({', '.join(notes)})" if notes else ""
        view.add_row(
            sample.prompt.question + note,
            shorten(sample.text),
            str(len(sample.input_ids)),
            str(sample.cached_tokens),
            str(len(sample.output_ids)),
            f"{len(sample.routes)} of {sample.expected_rows}",
            "yes" if sample.complete else "NO",
            f"{verdict.sets - verdict.differing:,} of {verdict.sets:,}",
        )
    return view


def shorten(text: str) -> str:
    """One line of at most ANSWER_CHARACTERS."""
    line = " ".join(text.split())
    return line if len(line) <= ANSWER_CHARACTERS else line[: ANSWER_CHARACTERS - 1].rstrip() + "…"


def load(samples: list[Sample]) -> np.ndarray:
    """float [L, E]: share of its layer's tokens that each expert served, over all samples; a row sums to K."""
    num_experts = samples[0].routes.num_experts
    ids_TLK = np.concatenate([s.routes.experts_TLK for s in samples])
    counts = [np.bincount(ids_TK.ravel(), minlength=num_experts) for ids_TK in ids_TLK.swapaxes(0, 1)]
    return np.stack(counts) / len(ids_TLK)


def picture(samples: list[Sample], file: Path) -> None:
    """Write a PNG: which share of the tokens each expert of each layer served."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    load_LE = load(samples)
    layers, experts = load_LE.shape
    figure = Figure(figsize=(3.2 + 0.32 * experts, 2.0 + 0.2 * layers), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(100 * load_LE, cmap="viridis", aspect="auto", vmin=0)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_xticks(range(experts))
    axes.set_yticks(range(0, layers, 2), samples[0].routes.layer_ids[::2])
    even = 100 * samples[0].routes.top_k / experts
    axes.set_title(f"Expert load over {sum(len(s.routes) for s in samples):,} tokens", loc="left")
    figure.colorbar(image, label=f"% of the layer's tokens (even load: {even:.0f}%)")
    FigureCanvasAgg(figure).print_png(file)
