"""Which names of a scope hold dictionaries that end up in others: the only names that make a path differ."""

from __future__ import annotations

import ast


def alternatives(node: ast.expr) -> list[ast.expr]:
    """The expressions whose value a conditional expression may give."""
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            return alternatives(body) + alternatives(orelse)
        case ast.BoolOp(values=values):
            return [one for value in values for one in alternatives(value)]
    return [node]


def sources(node: ast.expr | None) -> set[str]:
    """Names whose dictionaries an expression's dictionary is made of."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.Dict(keys=keys, values=values):
            return set().union(*(sources(v) for k, v in zip(keys, values, strict=True) if k is None))
        case ast.Call(func=func, args=args, keywords=keywords):
            inner = [*args, *(k.value for k in keywords if k.arg is None)]
            if isinstance(func, ast.Attribute):
                inner.append(func.value)
            return set().union(*(sources(i) for i in inner))
        case ast.IfExp() | ast.BoolOp():
            return set().union(*(sources(one) for one in alternatives(node)))
        case ast.BinOp(left=left, right=right):
            return sources(left) | sources(right)
        case ast.NamedExpr(target=target, value=value):
            return sources(target) | sources(value)
    return set()


def tracked_names(nodes: list[ast.AST], roots: set[str]) -> set[str]:
    """The roots, what their dictionaries are made of, and other names of them: no other name makes a path differ."""
    flows: list[tuple[set[str], set[str], bool]] = []  # (to, from, is the same dictionary under another name)
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value):
                same = any(isinstance(one, ast.Name) for one in alternatives(value))
                stored = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                flows.append((stored, sources(value), same))
            case ast.AnnAssign(target=target, value=value) | ast.AugAssign(target=target, value=value):
                flows.append((sources(target), sources(value), isinstance(value, ast.Name)))
            case ast.NamedExpr(target=target, value=value):
                flows.append((sources(target), sources(value), True))
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
                flows.append(({name}, sources(node), False))
    tracked = set(roots)
    while True:
        made_of = [source for to, source, _ in flows if to & tracked]
        renamed = [to for to, source, same in flows if same and source & tracked]
        more = set().union(*made_of, *renamed)
        if more <= tracked:
            return tracked
        tracked |= more
