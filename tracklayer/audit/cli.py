"""`tracklayer audit`: routes of any engine against a reference pass of the model they should be of.

    tracklayer audit --model DIR --routes FILE [--tokens FILE] [--json] [--html OUT]

Exit status: 0 all requests clean, 1 a fault or unexplained differences, 2 input that can not be audited.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracklayer.audit.compare import Observed
from tracklayer.audit.load import Recorded, lay, read_recorded, read_tokens
from tracklayer.audit.report import as_json, print_table, status
from tracklayer.audit.scores import NOISE, TIE_SIGMAS, Array, ReferenceScores
from tracklayer.audit.verdict import Report, audit
from tracklayer.config import load_model_config
from tracklayer.errors import CheckpointError, TracklayerError, UserError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tracklayer audit", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="checkpoint directory of the reference (Hugging Face layout)")
    parser.add_argument("--routes", required=True, help="JSON reply (one, a list, one a line), .npy, or route file")
    parser.add_argument("--tokens", help="token ids (JSON or .npy) of each request, where the routes file has none")
    parser.add_argument("--layers", choices=("moe", "all"), help="layer axis of the routes, where two readings fit")
    parser.add_argument("--ids-dtype", default="int32", help="type of flat base64 ids where the reply does not say it")
    parser.add_argument("--dtype", default="float32", choices=tuple(NOISE), help="type that the reference runs in")
    parser.add_argument("--device", default="cpu", help="where the reference runs")
    parser.add_argument("--noise", default="bfloat16", choices=tuple(NOISE), help="type that the engine ran in")
    parser.add_argument("--noise-factor", type=float, default=1.0, help="multiplies the noise assumed for that type")
    parser.add_argument("--tie-sigmas", type=float, default=TIE_SIGMAS, help="near tie: up to so many sigmas of noise")
    parser.add_argument(
        "--other-weights", action="append", default=[], metavar="DIR", help="weights that may have chosen"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the audit; prints the outcome and gives the exit status."""
    args = _parser().parse_args(argv)
    try:
        if args.tie_sigmas <= 0:
            raise UserError(f"--tie-sigmas must be positive, got {args.tie_sigmas}")
        reports = audit_files(args)
        if args.html:
            write_page(args.html, reports)
    except TracklayerError as error:
        print(f"tracklayer audit: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(as_json(reports), indent=2))
    else:
        from rich.console import Console

        print_table(reports, Console())
    return status(reports)


def write_page(path: str, reports: Sequence[Report]) -> None:
    from tracklayer.audit.html import page

    try:
        Path(path).write_text(page(reports))
    except OSError as error:
        raise UserError(f"the page can not be written to {path}: {error}") from error


def load_model(path: str, dtype: str, device: str) -> Any:
    """The checkpoint as a Hugging Face causal model in eval mode. Raises CheckpointError when it can not be loaded."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    load_model_config(path)
    logging.disable_progress_bar()  # standard error is for reasons
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
        return model.to(device).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path!r} can not be loaded as a causal language model: {error}") from error


def audit_files(args: argparse.Namespace) -> list[Report]:
    """All requests of a routes file, by the parsed command line."""
    recorded = read_recorded(args.routes, args.ids_dtype)
    tokens = _tokens(recorded, args.tokens)
    requests, scores = _reference(args, args.model, recorded, tokens)
    versions = [_reference(args, path, recorded, tokens)[1] for path in args.other_weights]
    reports = []
    for i, observed in enumerate(requests):
        others = [s for j, s in enumerate(scores) if j != i]
        known = [version[i] for version in versions]
        reports.append(audit(observed, scores[i], others=others, versions=known, tie_sigmas=args.tie_sigmas))
    return reports


def _tokens(recorded: Sequence[Recorded], path: str | None) -> list[Array]:
    if path is not None:
        tokens = read_tokens(path)
        if len(tokens) != len(recorded):
            raise UserError(f"{path} has {len(tokens)} token sequences for {len(recorded)} requests")
        return tokens
    lacking = [r.name for r in recorded if r.token_ids is None]
    if lacking:
        raise UserError(f"{lacking[0]} comes without its token ids: give them with --tokens FILE")
    return [r.token_ids for r in recorded if r.token_ids is not None]


def _reference(
    args: argparse.Namespace, path: str, recorded: Sequence[Recorded], tokens: Sequence[Array]
) -> tuple[list[Observed], list[ReferenceScores]]:
    """The routes laid out for that checkpoint, and its scores of each request. One model is in memory at a time."""
    from tracklayer.audit.reference import reference_scores
    from tracklayer.replay.hf import route_shape

    model = load_model(path, args.dtype, args.device)
    shape = route_shape(model)
    requests = [lay(r, shape, len(ids), args.layers) for r, ids in zip(recorded, tokens, strict=True)]
    scores = [
        reference_scores(
            model,
            ids,
            request,
            noise_dtype=args.noise,
            noise_factor=args.noise_factor,
            tie_sigmas=args.tie_sigmas,
            name=f"{request.name} under {path}",
        )
        for request, ids in zip(requests, tokens, strict=True)
    ]
    return requests, scores


if __name__ == "__main__":
    sys.exit(main())
