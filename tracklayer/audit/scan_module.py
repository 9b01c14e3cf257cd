"""The constructions of one parsed file: found scope by scope, each judged by how its layer id arrives."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tracklayer.audit.scan_flow import Flow, Scope
from tracklayer.audit.scan_names import sources
from tracklayer.audit.scan_scope import FUNCTIONS, Bindings, ClassInfo, Judgement, last_name, worst
from tracklayer.audit.scan_state import Absent, Outcome, Outcomes, Present, Unknown

Verdict = Literal["passed", "missing", "wrong", "unknown"]
How = Literal["keyword", "positional", "dictionary", "none"]
# Calls that look at a class and construct nothing.
INSPECTORS = frozenset(["isinstance", "issubclass", "cast"])


@dataclass(frozen=True)
class Site:
    """One construction. `how` says by which way the layer id arrives; `why` gives the verdict's reason."""

    path: str
    line: int
    column: int
    name: str
    verdict: Verdict
    how: How
    why: str


def body_of(scope: Scope) -> list[ast.stmt] | list[ast.expr]:
    """What runs inside a scope: not its decorators, defaults and bases, which the scope around it evaluates."""
    return [scope.body] if isinstance(scope, ast.Lambda) else scope.body


def outer_parts(node: ast.AST) -> list[ast.expr]:
    """Of a nested definition, what the scope around it evaluates (base classes construct nothing)."""
    parts = list(getattr(node, "decorator_list", []))
    if isinstance(node, FUNCTIONS):
        parts += [d for d in [*node.args.defaults, *node.args.kw_defaults] if d is not None]
    return parts


def classes_in(value: ast.expr | None) -> Iterator[ast.Name | ast.Attribute]:
    """The class expressions that an assigned value may be: itself, or the branches of a condition."""
    match value:
        case ast.Name() | ast.Attribute():
            yield value
        case ast.IfExp(body=body, orelse=orelse):
            yield from classes_in(body)
            yield from classes_in(orelse)
        case ast.BoolOp(values=values):
            for inner in values:
                yield from classes_in(inner)


class Module:
    """`sites`: the constructions of one file. `values`: uses of a router class that can not be followed."""

    def __init__(
        self, path: str, tree: ast.Module, names: set[str], classes: dict[str, list[ClassInfo]], keyword: str
    ) -> None:
        self.path, self.names, self.classes, self.keyword = path, names, classes, keyword
        self.sites: list[Site] = []
        self.values: list[Site] = []
        self._visit([tree], {name: name for name in names})
        self.sites.sort(key=lambda s: (s.line, s.column))
        self.values.sort(key=lambda s: (s.line, s.column))

    def _visit(self, chain: list[Scope], known: Mapping[str, str]) -> None:
        """The constructions of the innermost scope of `chain`, then those of the scopes nested in it.

        `known` maps the names under which this scope knows router classes to the classes' own.
        """
        scope = chain[-1]
        nodes, inner = self._contents(scope)
        known = {**known, **self._aliases(nodes, known)}
        calls = [n for n in nodes if isinstance(n, ast.Call) and self._constructed(n, known)]
        unpacked = self._unpacked(scope, nodes, calls)
        for call in calls:
            self.sites.append(self._judge(call, chain, known, unpacked.get(call, {})))
        self._find_values(nodes, known)
        for nested in inner:
            self._visit([*chain, nested], known)

    def _contents(self, scope: Scope) -> tuple[list[ast.AST], list[Scope]]:
        """Every node that runs in this scope itself, annotations left out, and the scopes nested in it."""
        nodes: list[ast.AST] = []
        inner: list[Scope] = []
        stack: list[ast.AST] = [*body_of(scope)]
        while stack:
            node = stack.pop()
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                inner.append(node)
                stack.extend(outer_parts(node))
                continue
            nodes.append(node)
            skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
            stack.extend(child for child in ast.iter_child_nodes(node) if child is not skipped)
        return nodes, inner

    def _aliases(self, nodes: list[ast.AST], known: Mapping[str, str]) -> dict[str, str]:
        """Other names of the classes: `import TopK as Router`, `Router = TopK`, `kind = HashTopK if x else TopK`."""
        pairs: list[tuple[str, str]] = []
        for node in nodes:
            match node:
                case ast.ImportFrom(names=imported):
                    pairs += [(a.asname, a.name) for a in imported if a.asname]
                case ast.Assign(targets=[ast.Name(id=alias) | ast.Attribute(attr=alias)], value=value):
                    pairs += [(alias, name) for c in classes_in(value) if (name := last_name(c))]
        found: dict[str, str] = {}
        while more := {a: {**known, **found}[n] for a, n in pairs if n in {**known, **found} and a not in found}:
            more = {a: n for a, n in more.items() if a not in known}
            if not more:
                break
            found |= more
        return found

    def _constructed(self, call: ast.Call, known: Mapping[str, str]) -> str | None:
        """The name of the router class that a call constructs (or that a partial fixes arguments of)."""
        name = last_name(call.func)
        if name == "partial" and call.args:
            inner = last_name(call.args[0])
            return known.get(inner or "")
        return None if isinstance(call.func, ast.Subscript) else known.get(name or "")

    def _unpacked(
        self, scope: Scope, nodes: list[ast.AST], calls: list[ast.Call]
    ) -> dict[ast.Call, dict[ast.expr, set[Outcome]]]:
        """What each ** argument of these calls may hold under the keyword."""
        found: dict[ast.Call, dict[ast.expr, set[Outcome]]] = {}

        def listen(call: ast.Call, read: Callable[[ast.expr], Outcomes]) -> None:
            if call in calls:
                for keyword in call.keywords:
                    if keyword.arg is None:
                        found.setdefault(call, {}).setdefault(keyword.value, set()).update(read(keyword.value))

        stars = [k.value for call in calls for k in call.keywords if k.arg is None]
        if stars:
            Flow(scope, self.keyword, nodes, set().union(*map(sources, stars)), listen).run()
        return found

    def _judge(
        self,
        call: ast.Call,
        chain: list[Scope],
        known: Mapping[str, str],
        unpacked: dict[ast.expr, set[Outcome]],
    ) -> Site:
        name = self._constructed(call, known) or "?"
        partial = last_name(call.func) == "partial"
        args = call.args[1:] if partial else call.args
        how, judged = self._layer(call, args, name, Bindings(chain, self.classes, call.lineno), unpacked)
        if partial and judged is None:
            judged = Judgement(None, "the layer id may be passed when the partial is called")
        verdict: Verdict = "missing"
        why = f"no {self.keyword} is passed"
        if judged is not None:
            verdict = "passed" if judged.ok else "unknown" if judged.ok is None else "wrong"
            why = judged.why if judged.ok is None else f"{self.keyword} {judged.why}"
        elif how == "dictionary":
            shown = ", ".join(f"`**{_short(k.value)}`" for k in call.keywords if k.arg is None)
            why = f"no {self.keyword} in {shown} on at least one path"
        return Site(self.path, call.lineno, call.col_offset + 1, name, verdict, how, why)

    def _layer(
        self,
        call: ast.Call,
        args: list[ast.expr],
        name: str,
        bindings: Bindings,
        unpacked: dict[ast.expr, set[Outcome]],
    ) -> tuple[How, Judgement | None]:
        """How the layer id arrives, and what is passed (None: nothing)."""
        for keyword in call.keywords:
            if keyword.arg == self.keyword:
                return "keyword", bindings.judge(keyword.value)
        index = self._position(name)
        if index is not None:
            if any(isinstance(a, ast.Starred) for a in args[: index + 1]):
                return "positional", Judgement(None, "`*` arguments can not be followed")
            if len(args) > index:
                return "positional", bindings.judge(args[index])
        stars = [k.value for k in call.keywords if k.arg is None]
        if not stars:
            return "none", None
        # A key may stand in one of several ** only, so one that surely holds it decides, and so do the others if
        # all but some surely lack it.
        each = [unpacked.get(star, {Unknown("the call is on no path that was followed")}) for star in stars]
        sure = [o for o in each if all(isinstance(x, Present) for x in o)]
        open_ = sure[:1] or [o for o in each if any(not isinstance(x, Absent) for x in o)] or [{Absent()}]
        outcomes = set().union(*open_)
        if Absent() in outcomes:
            return "dictionary", None
        return "dictionary", worst(
            [bindings.judge(o.node) if isinstance(o, Present) else Judgement(None, o.why) for o in outcomes]
        )

    def _position(self, name: str) -> int | None:
        """Index of the layer id among the positional parameters of the class, where the tree defines it so."""
        for info in self.classes.get(name, []):
            if info.positional and self.keyword in info.positional:
                return info.positional.index(self.keyword)
        return None

    def _find_values(self, nodes: list[ast.AST], known: Mapping[str, str]) -> None:
        """Uses of a class that neither construct it, nor name it, nor only look at it."""
        followed: set[ast.AST] = set()
        for node in nodes:
            match node:
                case ast.Call(func=func, args=args):
                    followed.add(func)
                    name = last_name(func)
                    if name == "partial":
                        followed.update(args[:1])
                    elif name in INSPECTORS:
                        followed.update(inner for a in args for inner in ast.walk(a))
                case ast.Assign(value=value):
                    followed.update(classes_in(value))
                case ast.Attribute(value=value) | ast.Subscript(value=value):
                    followed.add(value)
                case ast.Compare():
                    followed.update(ast.walk(node))
                case ast.BinOp(op=ast.BitOr()):  # a union of types
                    followed.update([node.left, node.right])
            if isinstance(node, ast.Subscript):  # Optional[TopK]
                followed.update(ast.walk(node.slice))
        for node in nodes:
            used = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in followed
            if used and node.id in self.names:
                why = "the class is used as a value; what is constructed through it can not be followed"
                self.values.append(Site(self.path, node.lineno, node.col_offset + 1, node.id, "unknown", "none", why))


def _short(node: ast.expr, limit: int = 60) -> str:
    text = ast.unparse(node).replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 1] + "…"
