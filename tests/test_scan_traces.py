"""The scan's dictionary verdicts against what really happens: random programs are scanned, then run on every path.

A program is one function over flags and list lengths, each read once, so that every path can be taken. "passed" must
hold on all paths and "missing" be seen on one.
"""

from __future__ import annotations

import ast
import itertools
import random

import pytest

from tracklayer.audit.scan_module import Module

NAMES = ("a", "b", "c")
VALUES = ("{}", "dict(k=1)", "{'layer_id': layer_id}", "dict(k=1, layer_id=layer_id)")


class Program:
    """A random function `build` whose `TopK(**name)` calls are numbered by their line."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.flags = self.lists = 0
        lines = [f"{name} = {self.random.choice(VALUES)}" for name in NAMES]
        lines += self.block(depth=0, size=6)
        lines += [f"TopK(**{name})" for name in NAMES]
        self.source = "def build(layer_id, flags, lists):\n" + "\n".join("    " + line for line in lines) + "\n"

    def block(self, depth: int, size: int) -> list[str]:
        lines: list[str] = []
        for _ in range(self.random.randint(1, size)):
            lines += self.compound(depth) if depth < 3 and self.random.random() < 0.35 else [self.simple()]
        return lines

    def simple(self) -> str:
        d, e = self.random.choice(NAMES), self.random.choice(NAMES)
        return self.random.choice(
            [
                f"{d} = {self.random.choice(VALUES)}",
                f"{d}['layer_id'] = layer_id",
                f"{d}['k'] = 2",
                f"{d}.pop('layer_id', None)",
                f"{d}.update({e})",
                f"{d}.update(layer_id=layer_id)",
                f"{d}.setdefault('layer_id', layer_id)",
                f"{d}.clear()",
                f"{d} = {e}",
                f"{d} = {e}.copy()",
                f"{d} = {{**{e}, 'k': 3}}",
                f"{d} = {e} | {self.random.choice(NAMES)}",
                f"{d} |= {e}",
                f"{d} = {e} if {self.flag()} else {self.random.choice(VALUES)}",
                f"TopK(**{d})",
            ]
        )

    def flag(self) -> str:
        self.flags += 1
        return f"flags[{self.flags - 1}]"

    def compound(self, depth: int) -> list[str]:
        inner = ["    " + line for line in self.block(depth + 1, 3)]
        other = ["    " + line for line in self.block(depth + 1, 2)]
        kind = self.random.choice(["if", "if else", "return", "for", "continue", "try"])
        if kind in ("for", "continue"):
            self.lists += 1
            leave = [f"    if {self.flag()}:", f"        {self.random.choice(['continue', 'break'])}"]
            return [f"for _ in lists[{self.lists - 1}]:", *inner, *(leave if kind == "continue" else []), *other]
        if kind == "try":
            return ["try:", *inner, f"    if {self.flag()}: raise KeyError", *other, "except KeyError:", *other]
        if kind == "return":
            return [f"if {self.flag()}:", *inner, "    return"]
        return [f"if {self.flag()}:", *inner, *(["else:", *other] if kind == "if else" else [])]

    def outcomes(self) -> dict[int, set[bool]]:
        """Line of each call -> whether the layer id was there, over all paths."""
        seen: dict[int, set[bool]] = {}
        code = compile(self.source, "program", "exec")

        def router(**given: object) -> None:
            import sys

            seen.setdefault(sys._getframe(1).f_lineno, set()).add("layer_id" in given)

        for flags in itertools.product((False, True), repeat=self.flags):
            for lengths in itertools.product((0, 1, 2), repeat=self.lists):
                scope: dict[str, object] = {"TopK": router}
                exec(code, scope)
                scope["build"](3, flags, [range(n) for n in lengths])  # type: ignore[operator]
        return seen


@pytest.mark.parametrize("block", range(10))
def test_verdicts_are_what_happens(block: int) -> None:
    judged = 0
    for seed in range(block * 60, block * 60 + 60):
        program = Program(seed)
        if program.flags + 2 * program.lists > 9:
            continue  # too many paths to run
        seen = program.outcomes()
        for site in Module("p.py", ast.parse(program.source), {"TopK"}, {}, "layer_id").sites:
            happened = seen.get(site.line)
            if happened is None:
                continue  # behind a return on every path
            judged += 1
            told = f"line {site.line}: {site.verdict} ({site.why})\n{program.source}"
            if site.verdict == "passed":
                assert happened == {True}, told
            elif site.verdict == "missing":
                # The scan lets any statement under `try` raise; here only the raise does.
                assert False in happened or "try:" in program.source, told
            else:
                assert site.verdict == "unknown", told
    assert judged > 40
