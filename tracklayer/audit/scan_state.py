"""What the scan knows of dictionaries on one path: which names hold which, and what each may hold under the key."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Present:
    """The key is there with this expression as its value."""

    node: ast.expr


@dataclass(frozen=True)
class Absent:
    """The key is not there."""


@dataclass(frozen=True)
class Unknown:
    """It can not be told whether the key is there."""

    why: str


Outcome = Present | Absent | Unknown
Outcomes = frozenset[Outcome]
NOTHING: Outcomes = frozenset({Absent()})


def unknown(why: str) -> Outcomes:
    return frozenset({Unknown(why)})


def overlay(base: Outcomes, top: Outcomes) -> Outcomes:
    """The key after `top` was merged over `base` (dict.update, | and ** keep the later value)."""
    later = {o for o in top if not isinstance(o, Absent)}
    return frozenset(later | set(base)) if Absent() in top else frozenset(later)


class State:
    """One path: which dictionary object each name holds, and what each object may hold under the key."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.objects: dict[int, Outcomes] = {}

    def copy(self) -> State:
        other = State()
        other.names, other.objects = dict(self.names), dict(self.objects)
        return other

    def view(self) -> View:
        """The same for equal states, whatever their objects are numbered."""
        order: dict[int, int] = {}
        return tuple(
            (name, order.setdefault(obj, len(order)), self.objects[obj]) for name, obj in sorted(self.names.items())
        )

    def get(self, name: str) -> Outcomes | None:
        return self.objects[self.names[name]] if name in self.names else None


View = tuple[tuple[str, int, Outcomes], ...]
States = list[State]  # one for each path that differs; empty: unreachable
MAX_STATES = 128


def distinct(states: States) -> States:
    """Each state once; beyond MAX_STATES a single one in which what differs is unknown."""
    found = {state.view(): state for state in states}
    if len(found) <= MAX_STATES:
        return list(found.values())
    merged = State()
    for name in sorted({n for state in states for n in state.names}):
        values = {state.get(name) for state in states}
        shared = any(len(set(s.names.values())) < len(s.names) for s in states)  # two names of one dictionary
        value = next(iter(values)) if len(values) == 1 and not shared else None
        merged.names[name] = -1 - len(merged.names)
        merged.objects[merged.names[name]] = value or unknown(f"`{name}`: there are too many paths to follow")
    return [merged]
