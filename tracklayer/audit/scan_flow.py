"""What a dictionary may hold under one key at the moment it is unpacked: a small abstract interpreter of one scope.

It follows dictionaries that are built in the same function (literals, dict(), d[k] = v, update, |, |=, setdefault, pop,
del, copy, conditional expressions) through branches, loops and early exits, and guesses nothing: what comes from
elsewhere, or is handed to code that may change it, is an `Unknown`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

from tracklayer.audit.scan_names import alternatives, tracked_names
from tracklayer.audit.scan_state import NOTHING, Absent, Outcomes, Present, State, States, distinct, overlay, unknown

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module
# Callables that read an argument and never change it.
READERS = frozenset(("print", "len", "str", "repr", "list", "tuple", "set", "sorted", "bool", "isinstance", "type"))
READERS |= {"any", "all", "dict"}
MAX_ROUNDS = 64  # of a loop; the paths through it only grow, so that it settles long before

OnCall = Callable[[ast.Call, Callable[[ast.expr], Outcomes]], None]


class Flow:
    """Interprets one scope (its own `nodes`) for the dictionaries that the names `roots` hold.

    `on_call(call, outcomes_of)` is told every call met, with a reader for its ** arguments; a call is met once a
    path, so the listener unites what it is told.
    """

    def __init__(self, scope: Scope, key: str, nodes: list[ast.AST], roots: set[str], on_call: OnCall) -> None:
        self.scope, self.key, self.on_call = scope, key, on_call
        self.tracked = tracked_names(nodes, roots)
        self.next_object = 0
        self.exits: list[States] = []  # states that left the innermost loops by break or continue

    def run(self) -> None:
        state = State()
        if isinstance(self.scope, ast.Lambda):
            self.expr(self.scope.body, state)
            return
        if isinstance(self.scope, ast.FunctionDef | ast.AsyncFunctionDef):
            self.bind_parameters(self.scope.args, state)
        self.block(self.scope.body, [state])

    def bind_parameters(self, args: ast.arguments, state: State) -> None:
        for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]:
            self.assign(arg.arg, unknown(f"parameter `{arg.arg}` comes from the caller"), state)
        if args.kwarg:
            # A keyword that has a parameter of its own can never arrive in **kwargs.
            named = self.key in {a.arg for a in [*args.args, *args.kwonlyargs]}
            value = NOTHING if named else unknown(f"`**{args.kwarg.arg}` comes from the caller")
            self.assign(args.kwarg.arg, value, state)

    # -- statements: each takes one state, which it may change, and gives those after it -------------------------

    def block(self, body: Iterable[ast.stmt], states: States) -> States:
        for statement in body:
            states = distinct([after for state in states for after in self.statement(statement, state)])
        return states

    def fork(self, body: Iterable[ast.stmt], state: State) -> States:
        return self.block(body, [state.copy()])

    def statement(self, node: ast.stmt, state: State) -> States:
        match node:
            case ast.If():
                self.expr(node.test, state)
                return self.fork(node.body, state) + self.fork(node.orelse, state)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self.loop(node, state)
            case ast.Try() | ast.TryStar():
                return self.attempt(node, state)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self.expr(item.context_expr, state)
                    self.forget(item.optional_vars, state, "it is bound by a with statement")
                return self.block(node.body, [state])
            case ast.Match():
                self.expr(node.subject, state)
                return [state.copy(), *(after for c in node.cases for after in self.fork(c.body, state))]
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.escape_names(node, state, f"`{node.name}` may change it")
                return [state]
            case ast.Return() | ast.Raise():
                self.simple(node, state)
                return []
            case ast.Break() | ast.Continue():
                if self.exits:
                    self.exits[-1].append(state)
                return []
            case ast.Assign(targets=[target], value=ast.IfExp() | ast.BoolOp() as value):
                return self.choice(target, value, state)
        self.simple(node, state)
        return [state]

    def choice(self, target: ast.expr, value: ast.IfExp | ast.BoolOp, state: State) -> States:
        """A path for each value that a conditional expression may give."""
        self.expr(value, state)
        after = []
        for one in alternatives(value):
            after.append(state.copy())
            self.store(target, one, after[-1])
        return after

    def simple(self, node: ast.stmt, state: State) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                self.expr(value, state)
                for target in targets:
                    self.store(target, value, state)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.expr(value, state)
                self.store(target, value, state)
            case ast.AugAssign(target=ast.Name(id=name), op=ast.BitOr(), value=value) if name in state.names:
                self.expr(value, state)
                self.change(name, lambda old: overlay(old, self.read(value, state)), state)
            case ast.AugAssign(target=target, value=value):
                self.expr(value, state)
                self.forget(target, state, "it is changed by an augmented assignment")
            case ast.Delete(targets=targets):
                for target in targets:
                    self.delete(target, state)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.expr(child, state)

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, state: State) -> States:
        self.expr(node.test if isinstance(node, ast.While) else node.iter, state)
        entry: States = [state]
        for _ in range(MAX_ROUNDS):
            before = {s.view() for s in entry}
            inside = [s.copy() for s in entry]
            if not isinstance(node, ast.While):
                for s in inside:
                    self.forget(node.target, s, "it is a loop variable")
            self.exits.append([])
            after = self.block(node.body, inside)
            entry = distinct([*entry, *after, *self.exits.pop()])
            if {s.view() for s in entry} == before:
                break
        else:
            for s in entry:
                self.escape_names(node, s, "the loop does not settle")
        return entry + self.block(node.orelse, [s.copy() for s in entry]) if node.orelse else entry

    def attempt(self, node: ast.Try | ast.TryStar, state: State) -> States:
        partial = [state.copy()]
        current = [state]
        for statement in node.body:  # a handler may start after any statement of the body
            current = self.block([statement], current)
            partial += [s.copy() for s in current]
        partial = distinct(partial)
        handled = [after for h in node.handlers for after in self.block(h.body, [s.copy() for s in partial])]
        done = self.block(node.orelse, current)
        return self.block(node.finalbody, distinct(done + handled))

    # -- names -------------------------------------------------------------------------------------------------

    def assign(self, name: str, value: Outcomes, state: State) -> None:
        if name not in self.tracked:
            return
        self.next_object += 1
        state.names[name] = self.next_object
        state.objects[self.next_object] = value

    def change(self, name: str, how: Callable[[Outcomes], Outcomes], state: State) -> None:
        obj = state.names[name]
        state.objects[obj] = how(state.objects[obj])

    def forget(self, target: ast.AST | None, state: State, why: str) -> None:
        for node in ast.walk(target) if target is not None else ():
            if isinstance(node, ast.Name):
                self.assign(node.id, unknown(f"`{node.id}`: {why}"), state)

    def escape_names(self, node: ast.AST, state: State, why: str) -> None:
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and child.id in state.names:
                self.change(child.id, lambda old, n=child.id: unknown(f"`{n}`: {why}"), state)

    def store(self, target: ast.expr, value: ast.expr, state: State) -> None:
        match target:
            case ast.Name(id=name):
                if isinstance(value, ast.Name) and value.id in state.names:
                    state.names[name] = state.names[value.id]  # two names of one dictionary
                else:
                    self.assign(name, self.read(value, state), state)
            case ast.Subscript(value=ast.Name(id=name), slice=index) if name in state.names:
                if isinstance(index, ast.Constant):
                    if index.value == self.key:
                        self.change(name, lambda _: frozenset({Present(value)}), state)
                else:
                    extra = unknown(f"`{name}` is written under a computed key")
                    self.change(name, lambda old: (old - NOTHING) | extra if Absent() in old else old, state)
            case ast.Tuple() | ast.List():
                self.forget(target, state, "it is unpacked from a sequence")
            case ast.Attribute():
                self.escape_value(value, state, "it is stored in an attribute")

    def delete(self, target: ast.expr, state: State) -> None:
        match target:
            case ast.Name(id=name):
                state.names.pop(name, None)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=self.key)) if name in state.names:
                self.change(name, lambda _: NOTHING, state)

    def escape_value(self, value: ast.expr, state: State, why: str) -> None:
        if isinstance(value, ast.Name) and value.id in state.names:
            self.change(value.id, lambda _: unknown(f"`{value.id}`: {why}"), state)

    # -- expressions -------------------------------------------------------------------------------------------

    def expr(self, node: ast.expr, state: State) -> None:
        """Visit the calls of an expression, innermost first."""
        if isinstance(node, ast.Lambda):
            self.escape_names(node, state, "a lambda may change it")
            return
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            for generator in node.generators:
                self.forget(generator.target, state, "it is a loop variable")
        if isinstance(node, ast.NamedExpr):
            self.expr(node.value, state)
            self.store(node.target, node.value, state)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.expr(child, state)
            elif isinstance(child, ast.keyword):
                self.expr(child.value, state)
            elif isinstance(child, ast.comprehension):
                for part in [child.iter, *child.ifs]:
                    self.expr(part, state)
        if isinstance(node, ast.Call):
            self.call(node, state)

    def call(self, node: ast.Call, state: State) -> None:
        self.on_call(node, lambda value: self.read(value, state))
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name in state.names:
                self.method(name, method, node, state)
            case ast.Name(id=name) if name in READERS:
                return
            case ast.Attribute(value=ast.Name(id="copy"), attr="copy" | "deepcopy"):
                return
        for argument in [*node.args, *(k.value for k in node.keywords if k.arg is not None)]:
            self.escape_value(argument, state, f"`{ast.unparse(node.func)}` may change it")

    def method(self, name: str, method: str, node: ast.Call, state: State) -> None:
        first = node.args[0] if node.args else None
        hit = isinstance(first, ast.Constant) and first.value == self.key
        match method:
            case "update":
                top = self.arguments(node, state)
                self.change(name, lambda old: overlay(old, top), state)
            case "setdefault" if hit and len(node.args) > 1:
                self.change(name, lambda old: overlay(frozenset({Present(node.args[1])}), old), state)
            case "pop" if hit:
                self.change(name, lambda _: NOTHING, state)
            case "clear":
                self.change(name, lambda _: NOTHING, state)
            case "popitem" | "__setitem__" | "__ior__" | "__delitem__":
                self.change(name, lambda _: unknown(f"`{name}.{method}` is not followed"), state)
            case "setdefault" | "pop" if not isinstance(first, ast.Constant):
                self.change(name, lambda _: unknown(f"`{name}.{method}` has a computed key"), state)

    def arguments(self, call: ast.Call, state: State) -> Outcomes:
        """What `dict(...)` or `.update(...)` with these arguments lays under the key."""
        result = NOTHING
        for argument in call.args:
            result = overlay(result, self.read(argument, state))
        for keyword in call.keywords:
            if keyword.arg is None:
                result = overlay(result, self.read(keyword.value, state))
            elif keyword.arg == self.key:
                result = frozenset({Present(keyword.value)})
        return result

    def read(self, node: ast.expr, state: State) -> Outcomes:
        """What the dictionary that this expression gives may hold under the key."""
        match node:
            case ast.Name(id=name):
                return state.get(name) or unknown(f"`{name}` is not built in this function")
            case ast.Dict(keys=keys, values=values):
                return self.literal(keys, values, state)
            case ast.Call(func=ast.Name(id="dict")):
                return self.arguments(node, state)
            case ast.Call(func=ast.Attribute(value=inner, attr="copy"), args=[]):
                return self.read(inner, state)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="copy")), args=[inner]):
                return self.read(inner, state)
            case ast.IfExp(body=body, orelse=orelse):
                return self.read(body, state) | self.read(orelse, state)
            case ast.BoolOp(values=values):
                return frozenset().union(*(self.read(v, state) for v in values))
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return overlay(self.read(left, state), self.read(right, state))
            case ast.NamedExpr(value=value):
                return self.read(value, state)
            case ast.List(elts=pairs) | ast.Tuple(elts=pairs) if all(
                isinstance(p, ast.Tuple | ast.List) and len(p.elts) == 2 for p in pairs
            ):
                return self.literal([p.elts[0] for p in pairs], [p.elts[1] for p in pairs], state)
        return unknown(f"`{ast.unparse(node)}` can not be followed")

    def literal(self, keys: list[ast.expr | None], values: list[ast.expr], state: State) -> Outcomes:
        result = NOTHING
        for key, value in zip(keys, values, strict=True):
            if key is None:
                result = overlay(result, self.read(value, state))
            elif not isinstance(key, ast.Constant):
                if Absent() in result:
                    result = (result - NOTHING) | unknown(f"the key `{ast.unparse(key)}` is computed")
            elif key.value == self.key:
                result = frozenset({Present(value)})
        return result
