"""Whether the expression passed as a layer id is bound: a parameter, a local name, or an attribute that is assigned.

Works on one parsed file plus an index of the classes of the whole tree (attributes may be assigned by a base class).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from tracklayer.audit.scan_flow import Scope

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# Bases that are known to assign no attribute of the user's: with only these, a missing attribute is certain.
PLAIN_BASES = frozenset(["object", "Module", "ABC", "Generic", "Protocol", "Enum"])


@dataclass(frozen=True)
class Judgement:
    """ok True: bound. False: certainly wrong. None: not decided. `why` completes "the layer id ..."."""

    ok: bool | None
    why: str


@dataclass
class ClassInfo:
    """One class: its bases by last name, the attributes it assigns (first line of each, by method), its __init__."""

    bases: list[str]
    attributes: set[str] = field(default_factory=set)
    positional: list[str] | None = None


def last_name(node: ast.expr) -> str | None:
    """`TopK` for TopK, moe.TopK and TopK[int]; None for anything else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return last_name(value)
    return None


def walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Every node of a scope that is not inside a nested function or class (the nested definitions themselves are)."""
    stack: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            stack.extend(ast.iter_child_nodes(node))


def parameters(function: Function) -> list[ast.arg]:
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *([a.vararg] if a.vararg else []), *([a.kwarg] if a.kwarg else [])]


def index_class(node: ast.ClassDef) -> ClassInfo:
    info = ClassInfo([name for base in node.bases if (name := last_name(base))])
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            info.attributes.add(item.target.id)
        elif isinstance(item, ast.Assign):
            info.attributes |= {t.id for t in item.targets if isinstance(t, ast.Name)}
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            info.attributes.add(item.name)  # a property, at most
            info.attributes |= {attr for attr, _ in self_stores(item)}
            if item.name == "__init__":
                info.positional = [a.arg for a in [*item.args.posonlyargs, *item.args.args]][1:]
    return info


def self_stores(function: ast.AST) -> Iterator[tuple[str, int]]:
    """(attribute, line) of every `self.x = ...` in a method, nested functions included; setattr with a literal too."""
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Store()):
                yield attr, node.lineno
            case ast.Call(
                func=ast.Name(id="setattr"), args=[ast.Name(id="self"), ast.Constant(value=str() as attr), _]
            ):
                yield attr, node.lineno


class Bindings:
    """Judges expressions at one place: `chain` holds the enclosing scopes, outermost (the module) first."""

    def __init__(self, chain: list[Scope], classes: dict[str, list[ClassInfo]], line: int) -> None:
        self.chain, self.classes, self.line = chain, classes, line

    def judge(self, node: ast.expr) -> Judgement:
        match node:
            case ast.Constant(value=None):
                return Judgement(False, "is None")
            case ast.Constant(value=value):
                if isinstance(value, int) and not isinstance(value, bool):
                    return Judgement(None, f"is the constant {value}: right only for a model with one router")
                return Judgement(False, f"is {value!r}, not a layer index")
            case ast.Name(id=name):
                return self.name(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                return self.attribute(attr)
            case ast.BinOp(left=left, right=right):
                return self.parts([left, right])
            case ast.UnaryOp(operand=operand):
                return self.parts([operand])
            case ast.IfExp(body=body, orelse=orelse):
                return worst([self.judge(body), self.judge(orelse)])
            case ast.Call(func=ast.Name(id="int"), args=[inner], keywords=[]):
                return self.judge(inner)
        return Judgement(None, f"`{ast.unparse(node)}` can not be followed")

    def parts(self, nodes: list[ast.expr]) -> Judgement:
        """Arithmetic: constants are fine beside at least one bound name."""
        judged = [self.judge(n) for n in nodes if not isinstance(n, ast.Constant)]
        return worst(judged) if judged else Judgement(None, "is a constant: right only for a model with one router")

    def name(self, name: str) -> Judgement:
        for depth, scope in enumerate(reversed(self.chain)):
            if isinstance(scope, ast.ClassDef) and depth > 0:
                continue  # a method does not see the names of its class body
            values, bound = [], False
            if isinstance(scope, FUNCTIONS) and name in {a.arg for a in parameters(scope)}:
                return Judgement(True, f"is the parameter `{name}`")
            for node in walk_scope(scope):
                if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
                    bound = True
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    bound |= any((a.asname or a.name.split(".")[0]) == name for a in node.names)
                if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                    values.append(node.value)
            if bound:
                if values and all(isinstance(v, ast.Constant) for v in values):
                    return worst([self.judge(v) for v in values])
                return Judgement(True, f"is `{name}`, assigned in the enclosing scope")
        return Judgement(False, f"`{name}` is neither a parameter nor assigned in an enclosing scope")

    def attribute(self, attr: str) -> Judgement:
        owner = next((s for s in reversed(self.chain) if isinstance(s, ast.ClassDef)), None)
        if owner is None:
            return Judgement(None, f"`self.{attr}` is used outside a class")
        method = next((s for s in self.chain[self.chain.index(owner) + 1 :] if isinstance(s, FUNCTIONS)), None)
        here = index_class(owner)
        if attr in here.attributes:
            return self.order(attr, owner, method)
        found, open_end = self.inherited(here.bases, set())
        if attr in found:
            return Judgement(True, f"is `self.{attr}`, assigned by a base class")
        if open_end:
            return Judgement(
                None, f"`self.{attr}` is not assigned in this class, and its base {open_end} was not found"
            )
        return Judgement(False, f"`self.{attr}` is never assigned in class {owner.name} or its bases")

    def order(self, attr: str, owner: ast.ClassDef, method: Function | None) -> Judgement:
        """In __init__, an attribute that only a later line assigns is not there yet."""
        good = Judgement(True, f"is `self.{attr}`, assigned in class {owner.name}")
        if not isinstance(method, ast.FunctionDef) or method.name != "__init__":
            return good
        lines = [line for name, line in self_stores(method) if name == attr]
        elsewhere = any(
            attr in {name for name, _ in self_stores(item)} or getattr(item, "name", None) == attr
            for item in owner.body
            if item is not method and isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        if lines and min(lines) > self.line and not elsewhere:
            return Judgement(False, f"`self.{attr}` is assigned only later, on line {min(lines)}")
        return good

    def inherited(self, bases: list[str], seen: set[str]) -> tuple[set[str], str]:
        """Attributes assigned by the bases (all classes of that name), and the first base that was not found."""
        found: set[str] = set()
        missing = ""
        for base in bases:
            if base in PLAIN_BASES or base in seen:
                continue
            seen.add(base)
            if base not in self.classes:
                missing = missing or base
            for info in self.classes.get(base, []):
                more, lost = self.inherited(info.bases, seen)
                found |= info.attributes | more
                missing = missing or lost
        return found, missing


def worst(judged: list[Judgement]) -> Judgement:
    """A certain fault before an undecided part before a bound one."""
    return min(judged, key=lambda j: {False: 0, None: 1, True: 2}[j.ok])
