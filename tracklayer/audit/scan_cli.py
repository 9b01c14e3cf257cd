"""`tracklayer scan PATH`: the scan's command line and its three outputs (text, JSON, SARIF 2.1.0). No third party."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from tracklayer.audit.scan import ScanResult, scan
from tracklayer.audit.scan_module import Site
from tracklayer.errors import UserError

WHAT = "Find routers that are built without their layer id, in Python sources, without importing or running them."

# SARIF: one rule a verdict, (level, short description).
RULES: dict[str, tuple[str, str]] = {
    "missing": ("error", "A top-k router is constructed without its layer id"),
    "wrong": ("error", "A top-k router is given a layer id that is not bound to a layer"),
    "unknown": ("warning", "It can not be told whether a top-k router is given its layer id"),
    "unreadable": ("warning", "A source file could not be parsed"),
}


def text(result: ScanResult, verbose: bool = False) -> str:
    """Findings as path:line lines, then the sums. `verbose` lists the passed constructions too."""
    shown = [s for s in [*result.sites, *result.values] if verbose or s.verdict != "passed"]
    lines = [f"{s.path}:{s.line}:{s.column}: {s.verdict}: {s.name}: {s.why}" for s in shown]
    lines += [f"{path}: unreadable: {why}" for path, why in result.unreadable]
    sums = result.sums
    lines += [
        f"{sums['constructions']} constructions of {', '.join(result.names)} in {sums['files']} files; "
        f"{sums['without_literal_keyword']} without a literal {result.keyword} keyword, "
        f"{sums['through_dictionary']} of these through a dictionary",
        f"{sums['passed']} pass it, {sums['missing']} do not, {sums['wrong']} pass a wrong name, "
        f"{sums['unknown']} unknown, {sums['used_as_value']} uses as a value, {sums['unreadable']} files unreadable",
    ]
    return "\n".join(lines)


def as_json(result: ScanResult) -> dict[str, Any]:
    return {
        "root": result.root,
        "names": list(result.names),
        "keyword": result.keyword,
        "status": result.status,
        "sums": result.sums,
        "sites": [asdict(s) for s in result.sites],
        "values": [asdict(s) for s in result.values],
        "unreadable": [{"path": path, "why": why} for path, why in result.unreadable],
    }


def sarif(result: ScanResult) -> dict[str, Any]:
    """SARIF 2.1.0: one run, one result for each construction that does not pass its layer id."""

    def entry(rule: str, message: str, path: str, line: int, column: int) -> dict[str, Any]:
        region = {"startLine": line, "startColumn": column}
        where = {"artifactLocation": {"uri": path, "uriBaseId": "SRCROOT"}, "region": region}
        return {
            "ruleId": rule,
            "ruleIndex": list(RULES).index(rule),
            "level": RULES[rule][0],
            "message": {"text": message},
            "locations": [{"physicalLocation": where}],
        }

    def of_site(s: Site) -> dict[str, Any]:
        return entry(s.verdict, f"{s.name}: {s.why}", s.path, s.line, s.column)

    rules = [
        {"id": rule, "shortDescription": {"text": words}, "defaultConfiguration": {"level": level}}
        for rule, (level, words) in RULES.items()
    ]
    results = [of_site(s) for s in [*result.sites, *result.values] if s.verdict != "passed"]
    results += [entry("unreadable", why, path, 1, 1) for path, why in result.unreadable]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "tracklayer-scan", "rules": rules}},
                "columnKind": "unicodeCodePoints",
                "results": results,
            }
        ],
    }


def main(argv: list[str] | None = None) -> int:
    """Run the scan. Exit status: 0 every construction passes its layer id, 1 some do not, 2 undecided or bad usage."""
    parser = argparse.ArgumentParser(prog="tracklayer scan", description=WHAT)
    parser.add_argument("path", help="directory (or one file) of Python sources")
    parser.add_argument("--name", action="append", metavar="CLASS", help="router class; repeatable; default TopK")
    parser.add_argument("--keyword", default="layer_id", help="name of the layer argument")
    parser.add_argument("--verbose", action="store_true", help="list the constructions that pass it too")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--sarif", action="store_true", help="print SARIF 2.1.0")
    args = parser.parse_args(argv)
    try:
        result = scan(args.path, tuple(args.name or ["TopK"]), args.keyword)
    except UserError as error:
        print(f"tracklayer scan: {error}", file=sys.stderr)
        return 2
    if args.json or args.sarif:
        print(json.dumps(as_json(result) if args.json else sarif(result), indent=2))
    else:
        print(text(result, args.verbose))
    return result.status


if __name__ == "__main__":
    sys.exit(main())
