"""The families on a GPU (Triton kernels, CUDA graphs, recording, self-test) against the CPU's torch references.

    python tests/parity_gpu.py [variant ...] [--device cuda] [--out FILE] [--write]

prints a table. `--out` keeps its rows as JSON, written after each variant and added to what the file already holds, so
that a run may be cut into pieces, family by family. `--write` records the families whose rows all passed in
checked.json. `--device cpu` puts a CPU in the GPU's place.

The CPU engine makes the sequences greedily. The other engine gets each as a prompt (prefill) and makes it from its
beginning (decode). In float32 tokens and experts must be equal but for near ties; in bfloat16 most experts must be, and
each token of a position before which no expert is another must be equal or a near tie.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from parity import Answer, generate, tiny_engine

from tracklayer.models import listing

# dtype -> least share of equal greedy tokens, of equal experts. In 16 bits a near tie of a gate flips and moves all
# that follows: CPUs in bfloat16 and in float32 agree in 0.7 to 0.97 of the tokens and 0.94 to 0.998 of the experts.
BOUNDS = {"float32": (0.99, 0.99), "bfloat16": (0.5, 0.9)}


# A position's greedy token may be another where the two tokens are this near (nats, as the CPU sees them).
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass
class Agreement:
    """Shares of equal greedy tokens and experts in one dtype.

    moved: positions at or before which an expert is another, at a near tie of the gate; everything may follow.
    ties: other positions whose token is another, all near ties; unexplained: those that are none.
    """

    dtype: str
    tokens: float
    experts: float
    positions: int
    moved: int = 0
    ties: int = 0
    unexplained: int = 0

    @property
    def ok(self) -> bool:
        tokens, experts = BOUNDS[self.dtype]
        return self.tokens >= tokens and self.experts >= experts and not self.unexplained

    def __str__(self) -> str:
        others = f", {self.ties} ties, {self.unexplained} unexplained of {self.positions - self.moved} not moved"
        return f"{self.tokens:.3f} {self.experts:.3f}{others}{'' if self.ok else ' FAIL'}"


def judge(
    want_TV: np.ndarray, got_TV: np.ndarray, want_TLK: np.ndarray, got_TLK: np.ndarray, near: float
) -> tuple[int, int, int]:
    """(moved, ties, unexplained) of one sequence: log-probabilities [T, V] and routes [T - 1 or T, L, K] of both."""
    same_T = (np.sort(want_TLK, -1) == np.sort(got_TLK, -1)).all((1, 2))
    steady = len(want_TV) if same_T.all() else int(same_T.argmin())  # positions before the first expert that differs
    rows = np.arange(steady)
    want_T, got_T = want_TV[:steady].argmax(-1), got_TV[:steady].argmax(-1)
    margin_T = want_TV[rows, want_T] - want_TV[rows, got_T]
    other_T = want_T != got_T
    return len(want_TV) - steady, int((other_T & (margin_T <= near)).sum()), int((other_T & (margin_T > near)).sum())


def rows_of(answer: Answer, vocab: int) -> np.ndarray:
    """Log-probabilities [positions, V] from the logits of every prompt token, in order."""
    pieces = [*([answer.inputs] if answer.inputs is not None else []), *answer.outputs]
    rows_TV = np.full((sum(len(piece.token_ids) for piece in pieces), vocab), -np.inf, np.float32)
    t = 0
    for piece in pieces:
        for ids, values in zip(piece.top_ids, piece.top_logprobs, strict=True):
            rows_TV[t, ids] = values
            t += 1
    return rows_TV


def wide(variant: str) -> dict[str, Any]:
    """Overrides that make heads at least 16 wide, which tensor cores need."""
    if variant.startswith("dbrx"):
        return {"d_model": 128}
    if variant.startswith("phimoe"):
        rope = dict(tiny.VARIANTS[variant][2]["rope_parameters"])
        rope |= {key: 4 * rope[key] for key in ("short_factor", "long_factor")}
        return {"hidden_size": 128, "rope_parameters": rope}
    if variant.startswith("gemma4"):
        return {"hidden_size": 128, "head_dim": 32, "global_head_dim": 64}
    row = tiny.VARIANTS[variant]
    heads = (
        {"mamba_n_heads": 4 * row[2]["mamba_n_heads"]} if isinstance(row, tuple) and "mamba_n_heads" in row[2] else {}
    )
    return {"hidden_size": 128, **heads}


def check_on(variant: str, folder: Path, dtype: str, options: dict[str, Any]) -> tuple[Agreement, str]:
    """Agreement of the variant's run on an engine with `options` with its CPU run in `dtype`; the family's name."""
    tiny.save(variant, folder, **wide(variant))
    cpu = tiny_engine(folder, dtype=dtype)
    random = np.random.default_rng(7)
    prompts = {str(n): random.integers(0, cpu.info.vocab_size, n).tolist() for n in (3, 30, 90)}
    made = generate(cpu, prompts, 40)
    whole = {rid: answer.prompt + answer.tokens for rid, answer in made.items()}
    # A step of every token but the last gives rows at all positions of the sequence.
    expected = generate(cpu, whole, 1)
    other = tiny_engine(folder, **{"dtype": dtype, **options})
    found = generate(other, {f"{rid} again": tokens for rid, tokens in whole.items()}, 1)
    decoded = generate(other, {f"{rid} decoded": prompt for rid, prompt in prompts.items()}, 40)
    same, total, experts, judged = 0, 0, [], np.zeros(3, int)
    for rid in whole:
        want_TV = rows_of(expected[rid], cpu.info.vocab_size)
        got_TV = rows_of(found[f"{rid} again"], cpu.info.vocab_size)
        want_T, got_T = want_TV.argmax(-1), got_TV.argmax(-1)
        same, total = same + int((want_T == got_T).sum()), total + len(want_T)
        routes = expected[rid].routes, found[f"{rid} again"].routes
        judged += judge(want_TV, got_TV, *routes, NEAR_TIE[dtype])
        experts.append(share(expected[rid].routes, found[f"{rid} again"].routes))
        pairs = zip(made[rid].tokens, decoded[f"{rid} decoded"].tokens, strict=True)
        alike = next((n for n, (want, got) in enumerate(pairs) if want != got), 40)
        end = len(prompts[rid]) + alike - 1  # rows belong to equal inputs up to here
        experts.append(share(made[rid].routes[:end], decoded[f"{rid} decoded"].routes[:end]))
    agreement = Agreement(dtype, same / total, float(np.mean(experts)), total, *judged.tolist())
    return agreement, cpu.model.family.name


def share(want_TLK: np.ndarray, got_TLK: np.ndarray) -> float:
    """Share of the wanted experts that are also in the other's row."""
    return float((want_TLK[..., :, None] == got_TLK[..., None, :]).any(-1).mean())


def row_of(variant: str, device: str) -> dict[str, Any]:
    """One row of the table: variant, family, where it ran, and an Agreement for each dtype."""
    cells, family = {}, ""
    for dtype in BOUNDS:
        with tempfile.TemporaryDirectory() as folder:
            agreement, family = check_on(variant, Path(folder), dtype, {"device": device})
        cells[dtype] = {**asdict(agreement), "ok": agreement.ok}
        print(f"| {variant} | {family} | {agreement.positions} | {dtype} | {agreement} |", flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    where = f"{name}, torch {torch.__version__.partition('+')[0]}"
    return {"variant": variant, "family": family, "where": where, "cells": cells}


def passed(rows: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Whether each family's variants, as far as there are rows of them, all passed in every dtype."""
    families = {row["family"] for row in rows.values()}
    cells = {f: [c for row in rows.values() if row["family"] == f for c in row["cells"].values()] for f in families}
    return {family: all(cell["ok"] for cell in cells[family]) for family in sorted(families)}


def record(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Enter the families that passed on a GPU, and take out those that did not, in checked.json."""
    checked = json.loads(path.read_text())
    rows = {variant: row for variant, row in rows.items() if not row["where"].startswith("CPU")}
    for family, ok in passed(rows).items():
        checked.setdefault(family, {}).pop("gpu", None)
        if ok:
            checked[family]["gpu"] = next(row["where"] for row in rows.values() if row["family"] == family)
    path.write_text(json.dumps(checked, indent=1, sort_keys=True) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", metavar="variant", help="of tests/tiny.py; all if none is named")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file that keeps the rows")
    parser.add_argument("--write", action="store_true", help="record the families that passed in checked.json")
    given = parser.parse_args(argv)
    unknown = sorted(set(given.variants) - set(tiny.VARIANTS))
    if unknown:
        parser.error(f"no such variant: {', '.join(unknown)}; there are {', '.join(tiny.VARIANTS)}")
    rows = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    print("| variant | family | positions | dtype | equal tokens and experts |", "|-|-|-|-|-|", sep="\n")
    for variant in given.variants or tiny.VARIANTS:
        rows[variant] = row_of(variant, given.device)
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    if given.write:
        record(rows, listing.HERE / "checked.json")
    return int(not all(passed(rows).values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
