"""The audit of one request: compare, then name the fault. `audit` is the Python call; no torch.

report = audit(observed, scores)
report.status      0 clean, 1 a fault or unexplained differences
report.finding     the fault by name, or None
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tracklayer.audit.case import Case, Finding
from tracklayer.audit.compare import Comparison, Observed
from tracklayer.audit.faults import DETECTORS
from tracklayer.audit.patterns import PATTERNS
from tracklayer.audit.scores import TIE_SIGMAS, ReferenceScores

PART = 0.1  # share from which a fault is mentioned that accounts for a part only
TOLERATED = 1e-3  # share of sets beyond the noise, without a pattern, that still passes as clean


@dataclass(frozen=True, eq=False)
class Report:
    """The outcome for one request, with all that pictures need. `parts`: faults that account for some of it only."""

    observed: Observed
    scores: ReferenceScores
    comparison: Comparison
    finding: Finding | None
    parts: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> Literal["clean", "fault", "unexplained"]:
        if self.finding:
            return "fault"
        wrong = self.comparison.sums["wrong_share"]
        return "clean" if wrong <= TOLERATED else "unexplained"

    @property
    def status(self) -> int:
        return 0 if self.verdict == "clean" else 1

    @property
    def sentence(self) -> str:
        sums = self.comparison.sums
        if self.finding:
            return self.finding.sentence
        if self.verdict == "unexplained":
            some = "; ".join(f"{f.fault} would account for {f.explained:.0%}" for f in self.parts)
            return (
                f"{sums['wrong']} sets ({sums['wrong_share']:.2%}) differ beyond the noise, and no one fault accounts "
                f"for them{f': {some}' if some else ''}"
            )
        beyond = f", {sums['wrong']} beyond it (tolerated)" if sums["wrong"] else ""
        ties = f"{sums['tie']} sets differ by near ties within the noise" if sums["tie"] else "no near ties"
        return f"routes are the reference's: {ties}{beyond}"

    def as_dict(self) -> dict[str, Any]:
        """For machines: JSON-ready."""
        finding = None
        if self.finding:
            finding = {
                "fault": self.finding.fault,
                "explained": self.finding.explained,
                "sentence": self.finding.sentence,
                "evidence": dict(self.finding.evidence),
            }
        return {
            "name": self.observed.name,
            "reference": self.scores.name,
            "start": self.observed.start,
            "rows": int(self.observed.ids_TLK.shape[0]),
            "layer_ids": list(self.scores.layer_ids),
            "verdict": self.verdict,
            "sentence": self.sentence,
            "finding": finding,
            "parts": {f.fault: f.explained for f in self.parts},
            "sums": self.comparison.sums,
        }


def audit(
    observed: Observed,
    scores: ReferenceScores,
    *,
    others: Sequence[ReferenceScores] = (),
    versions: Sequence[ReferenceScores] = (),
    tie_sigmas: float = TIE_SIGMAS,
) -> Report:
    """Compare one request's routes with the reference and name the fault, if the differences follow one.

    others    reference scores of other requests of the same engine: tells whose rows these are
    versions  reference scores of these tokens under other weights: tells which weights chose
    Raises UserError when the routes do not fit the reference (layers, width, positions).
    """
    case = Case(observed, scores, others=others, versions=versions, tie_sigmas=tie_sigmas)
    return Report(observed, scores, case.comparison, *name_fault(case))


def name_fault(case: Case) -> tuple[Finding | None, tuple[Finding, ...]]:
    """The one fault that accounts for the wrong sets, or None; and, if None, those that account for a part."""
    missing = case.comparison.missing_TL
    if not case.num_wrong:
        if not missing.any():
            return None, ()
        words = f"rows are marked as missing (-1) at {case.where(missing)}; what is there is right"
        return Finding("missing rows", 1.0, words, {"sets": int(missing.sum())}), ()
    found = [f for detector in DETECTORS if (f := detector(case))]
    enough = [f for f in found if f.explained >= f.enough]
    if enough:
        return max(enough, key=lambda f: f.explained), ()  # max keeps the first of equals: the more specific
    if case.comparison.sums["wrong_share"] <= TOLERATED and case.row_share_T.max() < 0.5:
        return None, ()
    named = next((f for pattern in PATTERNS if (f := pattern(case))), None)
    return named, () if named else tuple(f for f in found if f.explained >= PART)
