"""The audit as one self-contained page: verdicts, and three inline SVG pictures a request. No script, no network.

Agreement by layer and position, load of the experts, histogram of the margins. Colours come from CSS variables that
follow the reader's light or dark setting; pictures scale to a phone's width.

T rows, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

import numpy as np

from tracklayer.audit.report import MARGIN_EDGES, margins
from tracklayer.audit.scores import TIE_SIGMAS
from tracklayer.audit.verdict import Report

WIDTH, LEFT, CELL_HEIGHT = 720, 56, 12
MAX_BINS = 64
MAX_PICTURED = 20  # requests with pictures: some hundred kilobytes each

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --page: #ffffff; --card: #f6f8fa; --line: #d0d7de;
  --good: #1a7f37; --tie: #bf8700; --bad: #cf222e; --bar: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --page: #0d1117; --card: #161b22;
  --line: #3d444d; --good: #3fb950; --tie: #d29922; --bad: #f85149; --bar: #4493f8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: 1rem 0; }
.verdict { font-weight: 600; } .clean { color: var(--good); } .fault { color: var(--bad); }
.unexplained { color: var(--tie); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
p { overflow-wrap: anywhere; } p.note { color: var(--soft); font-size: .875rem; margin: .2rem 0; }
svg { display: block; width: 100%; min-width: 34rem; height: auto; }
svg text { fill: var(--soft); font: 10px system-ui, sans-serif; }
.g { fill: var(--good); } .t { fill: var(--tie); } .b { fill: var(--bad); } .l { fill: var(--bar); }
.n { fill: var(--line); } .rule { stroke: var(--soft); stroke-dasharray: 4 3; }
"""


def page(reports: Sequence[Report]) -> str:
    """The whole page as text."""
    head = "".join(f"<th>{h}</th>" for h in ("request", "rows", "equal", "near ties", "wrong", "missing", "verdict"))
    rows = "".join(_summary_row(r) for r in reports)
    pictured = sorted(reports, key=lambda r: r.verdict == "clean")[:MAX_PICTURED]
    body = "".join(_section(r) for r in pictured)
    if len(reports) > len(pictured):
        body += f'<p class="note">Pictures of {len(pictured)} of {len(reports)} requests, those with a fault first.</p>'
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Route audit</title><style>{CSS}</style></head><body><h1>Route audit</h1>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"{body}</body></html>\n"
    )


def _summary_row(report: Report) -> str:
    sums = report.comparison.sums
    verdict = report.finding.fault if report.finding else report.verdict
    cells = [
        escape(report.observed.name),
        f"{len(report.observed.ids_TLK):,}",
        *(f"{sums[f'{name}_share']:.2%}" for name in ("equal", "tie", "wrong")),
        f"{sums['missing']:,}",
        f'<span class="verdict {report.verdict}">{escape(verdict)}</span>',
    ]
    return "<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"


def _section(report: Report) -> str:
    title = report.finding.fault if report.finding else report.verdict
    return (
        f"<section><h2>{escape(report.observed.name)}</h2>"
        f'<p><span class="verdict {report.verdict}">{escape(title)}.</span> {escape(report.sentence)}</p>'
        "<h3>Agreement by layer and position</h3>"
        '<p class="note">Green: equal; amber: near ties; red: wrong; grey: missing. Positions run to the right.</p>'
        f"{_agreement(report)}<h3>Load of the experts</h3>"
        '<p class="note">How often each expert was recorded, against an equal share (full colour: four times it).</p>'
        f"{_load(report)}<h3>Margins of the sets that differ</h3>"
        '<p class="note">How far the recorded set lies below the reference&rsquo;s choice, in standard deviations of '
        f"the noise. Left of the dashed line ({TIE_SIGMAS:g}): near ties.</p>{_histogram(report)}</section>"
    )


def _svg(height: float, label: str, content: str) -> str:
    return (
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{content}</svg></div>'
    )


def _rect(x: float, y: float, width: float, height: float, kind: str, opacity: float = 1.0, title: str = "") -> str:
    told = f"<title>{escape(title)}</title>" if title else ""
    faint = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place}{faint}>{told}</rect>' if told else f'<rect class="{kind}" {place}{faint}/>'


def _layer_labels(report: Report) -> str:
    step = max(1, len(report.scores.layer_ids) // 24)
    return "".join(
        f'<text x="{LEFT - 6}" y="{c * CELL_HEIGHT + 10}" text-anchor="end">layer {layer}</text>'
        for c, layer in enumerate(report.scores.layer_ids)
        if c % step == 0
    )


def _agreement(report: Report) -> str:
    """Each cell is a stack of bars: shares of equal, near-tie, wrong and missing sets among its positions."""
    comparison = report.comparison
    rows, layers = comparison.equal_TL.shape
    edges = np.unique(np.linspace(0, rows, min(rows, MAX_BINS) + 1).astype(int))
    width = (WIDTH - LEFT) / (len(edges) - 1)
    parts = [_layer_labels(report)]
    kinds = (
        ("g", comparison.equal_TL),
        ("t", comparison.tie_TL),
        ("b", comparison.wrong_TL),
        ("n", comparison.missing_TL),
    )
    for i, (first, end) in enumerate(pairwise(edges)):
        shares = np.stack([mask[first:end].mean(0) for _, mask in kinds])
        for c in range(layers):
            y, height = float(c * CELL_HEIGHT), CELL_HEIGHT - 1.0
            place = f"positions {first + report.observed.start}-{end - 1 + report.observed.start}"
            words = f"{place}, layer {report.scores.layer_ids[c]}: {shares[0, c]:.0%} equal, {shares[2, c]:.0%} wrong"
            parts.append(f"<g><title>{escape(words)}</title>")
            for (kind, _), share in zip(kinds, shares[:, c], strict=True):
                if share > 0:
                    parts.append(_rect(LEFT + i * width, y, width, height * share, kind))
                    y += height * share
            parts.append("</g>")
    bottom = layers * CELL_HEIGHT
    last = report.observed.start + rows - 1
    parts.append(f'<text x="{LEFT}" y="{bottom + 12}">{report.observed.start}</text>')
    parts.append(f'<text x="{WIDTH}" y="{bottom + 12}" text-anchor="end">position {last}</text>')
    return _svg(bottom + 16, "agreement by layer and position", "".join(parts))


def _load(report: Report) -> str:
    ids_TLK, experts = report.observed.ids_TLK, report.scores.num_experts
    bins = min(experts, MAX_BINS)
    width = (WIDTH - LEFT) / bins
    parts = [_layer_labels(report)]
    for c, layer in enumerate(report.scores.layer_ids):
        ids = ids_TLK[:, c].reshape(-1)
        ids = ids[(ids >= 0) & (ids < experts)]
        counts, edges = np.histogram(ids, bins=bins, range=(0, experts))
        relative = counts * bins / max(len(ids), 1)
        for e in range(bins):
            name = (
                f"expert {int(np.ceil(edges[e]))}" if bins == experts else f"experts {edges[e]:.0f}-{edges[e + 1]:.0f}"
            )
            words = f"layer {layer}, {name}: {relative[e]:.1f} of an equal share"
            opacity = 0.04 + 0.96 * min(relative[e] / 4.0, 1.0)
            parts.append(_rect(LEFT + e * width, c * CELL_HEIGHT, width, CELL_HEIGHT - 1, "l", opacity, words))
    bottom = len(report.scores.layer_ids) * CELL_HEIGHT
    parts.append(f'<text x="{LEFT}" y="{bottom + 12}">expert 0</text>')
    parts.append(f'<text x="{WIDTH}" y="{bottom + 12}" text-anchor="end">{experts - 1}</text>')
    return _svg(bottom + 16, "load of the experts by layer", "".join(parts))


def _histogram(report: Report) -> str:
    counts = margins(report)
    height, width = 120.0, (WIDTH - LEFT) / len(counts)
    scale = (height - 16) / np.log1p(max(int(counts.max()), 1))
    parts = []
    for i, count in enumerate(counts):
        low, high = MARGIN_EDGES[i], MARGIN_EDGES[i + 1]
        label = f"{low:g}-{high:g}" if np.isfinite(high) else f"over {low:g}"
        tall = float(np.log1p(count) * scale)
        kind = "t" if high <= TIE_SIGMAS else "b"
        x = LEFT + i * width
        parts.append(_rect(x + 2, height - tall, width - 4, tall, kind, title=f"{label} sigma: {count} sets"))
        parts.append(f'<text x="{x + width / 2:.1f}" y="{height + 12:g}" text-anchor="middle">{label}</text>')
        if count:
            y = max(height - tall - 3, 9)
            parts.append(f'<text x="{x + width / 2:.1f}" y="{y:.1f}" text-anchor="middle">{count:,}</text>')
    line = LEFT + MARGIN_EDGES.index(TIE_SIGMAS) * width
    parts.append(f'<line class="rule" x1="{line:.1f}" y1="0" x2="{line:.1f}" y2="{height:g}"/>')
    parts.append(f'<text x="{LEFT - 6}" y="{height:g}" text-anchor="end">sets (log)</text>')
    return _svg(height + 18, "histogram of margins", "".join(parts))
