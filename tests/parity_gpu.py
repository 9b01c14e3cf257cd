"""The families on a GPU (Triton kernels, CUDA graphs, recording, self-test) against the CPU's torch references.

`python tests/parity_gpu.py [variant ...]` prints a table; `--write` records the families that passed in checked.json;
`--cpu` puts a CPU in the GPU's place, and `--rounding` compares a bfloat16 CPU run with a float32 one: what 16 bits
alone do to a tiny random model (a near tie of a gate flips, and moves all that follows: 0.7 to 0.97 of the tokens and
0.94 to 0.998 of the experts agree).

The CPU engine makes the sequences greedily. The other engine gets each as a prompt (prefill) and makes it from its
beginning (decode). In float32 tokens and experts must be equal but for near ties; in bfloat16 most experts must be.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from parity import Answer, generate, tiny_engine

from tracklayer.models import listing

# dtype -> least share of equal greedy tokens, of equal experts
BOUNDS = {"float32": (0.99, 0.99), "bfloat16": (0.5, 0.9)}


@dataclass
class Agreement:
    """Shares of equal greedy tokens and experts in one dtype."""

    dtype: str
    tokens: float
    experts: float
    positions: int

    @property
    def ok(self) -> bool:
        tokens, experts = BOUNDS[self.dtype]
        return self.tokens >= tokens and self.experts >= experts

    def __str__(self) -> str:
        return f"{self.tokens:.3f} {self.experts:.3f}{'' if self.ok else ' FAIL'}"


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
    same, total, experts = 0, 0, []
    for rid in whole:
        want_TV = rows_of(expected[rid], cpu.info.vocab_size)
        got_TV = rows_of(found[f"{rid} again"], cpu.info.vocab_size)
        want_T, got_T = want_TV.argmax(-1), got_TV.argmax(-1)
        same, total = same + int((want_T == got_T).sum()), total + len(want_T)
        experts.append(share(expected[rid].routes, found[f"{rid} again"].routes))
        pairs = zip(made[rid].tokens, decoded[f"{rid} decoded"].tokens, strict=True)
        alike = next((n for n, (want, got) in enumerate(pairs) if want != got), 40)
        end = len(prompts[rid]) + alike - 1  # rows belong to equal inputs up to here
        experts.append(share(made[rid].routes[:end], decoded[f"{rid} decoded"].routes[:end]))
    return Agreement(dtype, same / total, float(np.mean(experts)), total), cpu.model.family.name


def share(want_TLK: np.ndarray, got_TLK: np.ndarray) -> float:
    """Share of the wanted experts that are also in the other's row."""
    return float((want_TLK[..., :, None] == got_TLK[..., None, :]).any(-1).mean())


def main(argv: list[str]) -> int:
    wanted = [a for a in argv if not a.startswith("--")] or list(tiny.VARIANTS)
    options = {} if "--cpu" in argv else {"dtype": "float32"} if "--rounding" in argv else {"device": "cuda"}
    dtypes = ["bfloat16"] if "--rounding" in argv else list(BOUNDS)
    passed: dict[str, bool] = {}
    print("equal tokens and experts", f"| variant | family | positions | {' | '.join(dtypes)} |", sep="\n")
    print(f"|-|-|-|{'-|' * len(dtypes)}")
    for variant in wanted:
        cells, family = [], ""
        for dtype in dtypes:
            with tempfile.TemporaryDirectory() as folder:
                agreement, family = check_on(variant, Path(folder), dtype, options)
            passed[family] = passed.get(family, True) and agreement.ok
            cells.append(agreement)
        print(f"| {variant} | {family} | {cells[0].positions} | {' | '.join(map(str, cells))} |", flush=True)
    if "--write" in argv and "device" in options:
        checked = listing.data("checked.json")
        for family, ok in passed.items():
            checked.setdefault(family, {}).pop("gpu", None)
            if ok:
                checked[family]["gpu"] = f"{torch.cuda.get_device_name()}, torch {torch.__version__.partition('+')[0]}"
        (listing.HERE / "checked.json").write_text(json.dumps(checked, indent=1, sort_keys=True) + "\n")
    return int(not all(passed.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
