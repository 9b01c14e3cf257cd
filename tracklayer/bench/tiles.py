"""The tiles of the expert kernels that are worth trying for a batch: n, b, stages, warps (kernels/tuning.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tracklayer.kernels.tuning import sorted_config

Tile = tuple[int, int, int, int]
MAX_UNROLLED = 40  # steps of the reduction that may be unrolled: more take minutes to compile

SMALL_UP: list[Tile] = [
    (2, 2048, 1, 4), (2, 1024, 1, 4), (2, 1024, 2, 4), (4, 512, 1, 4), (4, 512, 3, 4), (4, 512, 4, 4), (8, 256, 4, 4),
    (4, 1024, 1, 8), (4, 1024, 2, 8), (8, 512, 1, 8), (8, 512, 3, 4), (4, 2048, 1, 8), (16, 256, 3, 8), (8, 256, 6, 4),
    (1, 2048, 1, 4), (1, 1024, 2, 2), (2, 512, 4, 2), (4, 256, 4, 2), (16, 128, 5, 4),
]  # fmt: skip
SMALL_DOWN: list[Tile] = [
    (8, 256, 4, 4), (2, 512, 0, 4), (4, 256, 0, 4), (8, 256, 0, 8), (8, 256, 0, 4), (4, 128, 0, 2), (2, 256, 0, 2),
    (16, 256, 1, 4), (16, 256, 4, 4), (16, 256, 6, 4), (8, 256, 6, 4), (8, 256, 8, 4), (16, 128, 8, 4), (2, 1024, 0, 4),
    (8, 256, 8, 2), (4, 256, 8, 2), (16, 256, 6, 8), (8, 256, 10, 4), (8, 512, 4, 4), (8, 1024, 3, 4), (4, 1024, 3, 4),
    (4, 256, 12, 2), (8, 128, 12, 2),
]  # fmt: skip
WEIGHTS_UP: list[Tile] = [
    (64, 64, 4, 4), (64, 64, 6, 4), (64, 128, 2, 4), (64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 3, 4),
    (128, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 8), (128, 128, 2, 4), (64, 256, 2, 4),
]  # fmt: skip
WEIGHTS_DOWN: list[Tile] = [
    (64, 64, 4, 4), (64, 64, 6, 4), (64, 128, 3, 4), (64, 128, 5, 4), (128, 64, 4, 4), (128, 64, 6, 4),
    (128, 128, 2, 4), (128, 128, 3, 4), (128, 128, 4, 8), (128, 128, 3, 8), (64, 256, 3, 4), (256, 64, 4, 8),
]  # fmt: skip
ROWS_UP: dict[int, list[Tile]] = {
    64: [(64, 64, 3, 4), (128, 64, 3, 4), (128, 64, 4, 8), (64, 64, 4, 4)],
    128: [(128, 64, 3, 8), (128, 64, 4, 8), (64, 64, 3, 4), (64, 64, 3, 8), (64, 64, 4, 8), (64, 128, 2, 8)],
    256: [(64, 64, 3, 8), (64, 64, 4, 8)],
}
ROWS_DOWN: dict[int, list[Tile]] = {
    64: [(128, 64, 3, 4), (128, 64, 4, 4), (256, 64, 3, 4), (256, 64, 3, 8)],
    128: [(128, 64, 3, 8), (128, 64, 4, 8), (256, 64, 3, 8), (256, 64, 4, 8), (128, 64, 3, 4), (128, 128, 2, 8)],
    256: [(128, 64, 3, 8), (128, 64, 4, 8), (64, 64, 3, 8)],
}


@dataclass(frozen=True, slots=True)
class Form:
    """One way to run a batch: tiles to try for the gate-up and for the down product, and what they share."""

    name: str
    m: int
    ups: tuple[dict[str, Any], ...]
    downs: tuple[dict[str, Any], ...]

    def config(self, up: dict[str, Any], down: dict[str, Any]) -> dict[str, Any]:
        """What `fused_experts_triton` takes."""
        if self.name == "small":
            return {"form": "small", "up": up, "down": down}
        return sorted_config(self.name, self.m, up, down)

    def pairs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Every tile of both products in as few configurations as that takes."""
        count = max(len(self.ups), len(self.downs))
        return [(self.ups[min(i, len(self.ups) - 1)], self.downs[min(i, len(self.downs) - 1)]) for i in range(count)]


def _tiles(tiles: list[Tile], **shared: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"n": n, "b": b, "stages": stages, "warps": warps, **shared} for n, b, stages, warps in tiles)


def forms(num_tokens: int, experts: int, top_k: int, inner: int) -> Iterator[Form]:
    """The forms worth trying for a batch, by pairs per expert."""
    average = num_tokens * top_k / experts
    if num_tokens <= 16:
        downs = [t for t in SMALL_DOWN if t[2] or top_k * -(-inner // t[1]) <= MAX_UNROLLED]
        yield Form("small", 0, _tiles(SMALL_UP), _tiles(downs))
    for m in (16, 32, 64, 128):
        if num_tokens >= 2 and (m == 16 or average / 4 <= m <= average * 4) and average <= 80:
            yield Form("weights", m, _tiles(WEIGHTS_UP, group=1), _tiles(WEIGHTS_DOWN, group=1))
    for m in (128, 64, 256):
        if average >= 24 and m <= average * 4:
            for group in (8, 1) if average >= 200 else (8,):
                for halves in (False, True) if m > 64 else (False,):
                    shared = {"group": group, "halves": halves}
                    yield Form("rows", m, _tiles(ROWS_UP[m], **shared), _tiles(ROWS_DOWN[m], **shared))
