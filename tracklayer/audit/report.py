"""What an audit says: a table for people, one object for machines. The pictures are in html.py.

T rows, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracklayer.audit.scores import TIE_SIGMAS, Array
from tracklayer.audit.verdict import Report

# Edges of the margin histogram, in standard deviations of the noise; the last bin holds impossible sets too.
MARGIN_EDGES = (0.0, 1.0, 2.0, 4.0, TIE_SIGMAS, 16.0, 32.0, 64.0, 128.0, float("inf"))
STYLES = {"clean": "green", "fault": "red", "unexplained": "yellow"}


def status(reports: Sequence[Report]) -> int:
    """0: all clean. 1: at least one request has a fault or unexplained differences."""
    return max(r.status for r in reports)


def margins(report: Report) -> Array:
    """Counts of the differing sets in the bins of MARGIN_EDGES."""
    comparison = report.comparison
    sigmas = comparison.sigmas_TL[comparison.tie_TL | comparison.wrong_TL]
    counts = np.histogram(np.where(np.isinf(sigmas), 1e30, sigmas), bins=[*MARGIN_EDGES[:-1], 1e31])[0]
    return counts


def by_layer(report: Report) -> dict[str, Array]:
    """Shares [L] of equal, near-tie and wrong sets among those present; nan where a layer has none."""
    comparison = report.comparison
    present_L = (~comparison.missing_TL).sum(0)
    shares = {}
    for name in ("equal", "tie", "wrong"):
        count_L = getattr(comparison, f"{name}_TL").sum(0)
        shares[name] = np.divide(count_L, present_L, out=np.full(len(present_L), np.nan), where=present_L > 0)
    return shares


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Everything, JSON-ready; shares are null where a layer has no row."""

    def one(report: Report) -> dict[str, Any]:
        layers = {
            name: [None if np.isnan(v) else round(float(v), 6) for v in share_L]
            for name, share_L in by_layer(report).items()
        }
        edges = [None if np.isinf(e) else e for e in MARGIN_EDGES]
        histogram = {"edges_sigmas": edges, "sets": margins(report).tolist()}
        return {**report.as_dict(), "by_layer": layers, "margins": histogram}

    return {"status": status(reports), "requests": [one(r) for r in reports]}


def print_table(reports: Sequence[Report], console: Any) -> None:
    """A row for each request and, below, the verdict in words and the layers that differ. `console` is rich's."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Routes against the reference")
    for heading, justify in (
        ("request", "left"),
        ("rows", "right"),
        ("sets", "right"),
        ("equal", "right"),
        ("near ties", "right"),
        ("wrong", "right"),
        ("missing", "right"),
        ("verdict", "left"),
    ):
        table.add_column(heading, justify=justify, overflow="fold")
    for report in reports:
        sums = report.comparison.sums
        table.add_row(
            escape(report.observed.name),
            f"{len(report.observed.ids_TLK):,}",
            f"{sums['sets']:,}",
            f"{sums['equal_share']:.2%}",
            f"{sums['tie_share']:.2%}",
            f"{sums['wrong_share']:.2%}",
            f"{sums['missing']:,}",
            f"[{STYLES[report.verdict]}]{escape(report.finding.fault if report.finding else report.verdict)}[/]",
        )
    console.print(table)
    for report in reports:
        console.print(f"[bold]{escape(report.observed.name)}[/]: {escape(report.sentence)}", highlight=False)
        wrong_L = by_layer(report)["wrong"]
        worst = [c for c in np.argsort(-np.nan_to_num(wrong_L)) if wrong_L[c] > 0][:5]
        if worst:
            text = ", ".join(f"layer {report.scores.layer_ids[c]} {wrong_L[c]:.1%}" for c in worst)
            console.print(f"  most wrong: {text}", highlight=False)
