"""Cutting a growing text at markers, whatever the pieces that it arrives in."""

from __future__ import annotations

import re
from collections.abc import Iterator


class Cutter:
    """Splits a stream at markers. An end that may still become a marker is held back.

    No marker may be the beginning of another.
    """

    def __init__(self, markers: tuple[str, ...]) -> None:
        assert not any(a != b and b.startswith(a) for a in markers for b in markers), f"nested markers {markers}"
        self._pattern = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        self._beginnings = sorted({m[:i] for m in markers for i in range(1, len(m))}, key=len, reverse=True)
        self._rest = ""

    def feed(self, text: str) -> Iterator[tuple[str, bool]]:
        """(piece, whether it is a marker) of everything that is decided by now; no piece is empty."""
        text, at = self._rest + text, 0
        for found in self._pattern.finditer(text):
            if found.start() > at:
                yield text[at : found.start()], False
            yield found[0], True
            at = found.end()
        text = text[at:]
        held = next((b for b in self._beginnings if text.endswith(b)), "")
        self._rest = held
        if len(text) > len(held):
            yield text[: len(text) - len(held)], False

    def flush(self) -> Iterator[tuple[str, bool]]:
        """What was held back, at the end of the text."""
        rest, self._rest = self._rest, ""
        if rest:
            yield rest, False
