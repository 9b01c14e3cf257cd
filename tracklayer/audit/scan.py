"""Static check of an engine's source tree: does every construction of a top-k router pass its layer id?

A router that does not know its layer can not record where its choice belongs, and nothing at run time says so.
Standard library only; nothing of the tree is imported or run.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tracklayer.audit.scan_flow import Absent, Flow, Outcome, Present, Scope, Unknown
from tracklayer.audit.scan_scope import FUNCTIONS, Bindings, ClassInfo, Judgement, index_class, last_name, worst
from tracklayer.errors import UserError

Verdict = Literal["passed", "missing", "wrong", "unknown"]
How = Literal["keyword", "positional", "dictionary", "none"]
SKIPPED_DIRS = frozenset({".git", ".venv", "venv", "node_modules", "__pycache__", ".tox", "build", "dist"})


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


@dataclass
class ScanResult:
    """All constructions of a tree, in path order; `unreadable` are (path, reason) of files that could not be parsed."""

    root: str
    names: tuple[str, ...]
    keyword: str
    files: int = 0
    sites: list[Site] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)

    def count(self, verdict: Verdict) -> int:
        return sum(s.verdict == verdict for s in self.sites)

    @property
    def sums(self) -> dict[str, int]:
        """Totals: files, constructions, those without a literal keyword, those through a dictionary, each verdict."""
        return {
            "files": self.files,
            "constructions": len(self.sites),
            "without_literal_keyword": sum(s.how != "keyword" for s in self.sites),
            "through_dictionary": sum(s.how == "dictionary" for s in self.sites),
            **{v: self.count(v) for v in ("passed", "missing", "wrong", "unknown")},
            "unreadable": len(self.unreadable),
        }

    @property
    def status(self) -> int:
        """0: every construction passes its layer. 1: at least one does not. 2: at least one could not be decided."""
        if self.count("missing") or self.count("wrong"):
            return 1
        return 2 if self.count("unknown") or self.unreadable else 0


def scan(root: str | Path, names: tuple[str, ...] = ("TopK",), keyword: str = "layer_id") -> ScanResult:
    """Scan a directory (or one file) of Python sources for constructions of the classes `names` and their subclasses.

    Raises UserError when the path does not exist or holds no Python file, or a name is not an identifier.
    """
    root = Path(root)
    for word in [*names, keyword]:
        if not word.isidentifier():
            raise UserError(f"{word!r} is not a Python name; give class names such as TopK")
    if not names:
        raise UserError("no class name to look for; give at least one, such as TopK")
    if not root.exists():
        raise UserError(f"{str(root)!r} does not exist; give a directory or a file of Python sources")
    result = ScanResult(str(root), names, keyword)
    sources: list[tuple[str, bytes]] = []
    classes: dict[str, list[ClassInfo]] = {}
    for file in _python_files(root):
        result.files += 1
        shown = file.name if file == root else file.relative_to(root).as_posix()
        try:
            source = file.read_bytes()
            _index(_parse(source), classes)
            sources.append((shown, source))
        except (SyntaxError, ValueError, RecursionError) as error:
            result.unreadable.append((shown, f"{type(error).__name__}: {error}"))
    if not result.files:
        raise UserError(f"no Python file under {str(root)!r}; give the directory of the engine's sources")
    wanted = _with_subclasses(set(names), classes)
    for shown, source in sources:  # parsed a second time: the trees of all files at once would fill gigabytes
        if any(name.encode() in source for name in wanted):
            result.sites += _Module(shown, _parse(source), wanted, classes, keyword).sites()
    return result


def _python_files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.is_symlink() and path.name not in SKIPPED_DIRS:
            yield from _python_files(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


def _parse(source: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        return ast.parse(source)


def _index(tree: ast.Module, classes: dict[str, list[ClassInfo]]) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(index_class(node))


def _with_subclasses(names: set[str], classes: dict[str, list[ClassInfo]]) -> set[str]:
    """The names and every class of the tree that derives from one of them."""
    while True:
        more = {n for n, infos in classes.items() if any(set(i.bases) & names for i in infos)} - names
        if not more:
            return names
        names = names | more


class _Module:
    """The constructions of one file."""

    def __init__(
        self, path: str, tree: ast.Module, names: set[str], classes: dict[str, list[ClassInfo]], keyword: str
    ) -> None:
        self.path, self.tree, self.classes, self.keyword = path, tree, classes, keyword
        self.names = names | self._aliases(names)

    def _aliases(self, names: set[str]) -> set[str]:
        """Other names under which this file knows the classes: `import TopK as Router`, `Router = TopK`."""
        pairs: list[tuple[str, str | None]] = []
        for node in ast.walk(self.tree):
            match node:
                case ast.ImportFrom(names=imported):
                    pairs += [(a.asname, a.name) for a in imported if a.asname]
                case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Name() | ast.Attribute() as value):
                    pairs.append((alias, last_name(value)))
        known = set(names)
        while more := {alias for alias, name in pairs if name in known} - known:
            known |= more
        return known - names

    def sites(self) -> list[Site]:
        found: list[Site] = []
        self._visit([self.tree], found)
        return sorted(found, key=lambda s: (s.line, s.column))

    def _visit(self, chain: list[Scope], found: list[Site]) -> None:
        """The constructions of the innermost scope of `chain`, then those of the scopes nested in it."""
        scope = chain[-1]
        inner, calls = self._contents(scope)
        unpacked: dict[ast.Call, dict[ast.expr, set[Outcome]]] = {}
        if any(k.arg is None for call in calls for k in call.keywords):

            def listen(call, read) -> None:
                if call in calls:
                    for keyword in call.keywords:
                        if keyword.arg is None:
                            outcomes = read(keyword.value)
                            unpacked.setdefault(call, {}).setdefault(keyword.value, set()).update(outcomes)

            Flow(scope, self.keyword, listen).run()
        for call in calls:
            found.append(self._judge(call, chain, unpacked.get(call, {})))
        for nested in inner:
            self._visit([*chain, nested], found)

    def _contents(self, scope: Scope) -> tuple[list[Scope], list[ast.Call]]:
        """Scopes directly inside, and constructions, of a scope."""
        inner: list[Scope] = []
        calls: list[ast.Call] = []
        stack: list[ast.AST] = list(ast.iter_child_nodes(scope))
        while stack:
            node = stack.pop()
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                inner.append(node)
                # decorators and defaults belong to the outer scope
                outer = [*getattr(node, "decorator_list", [])]
                if not isinstance(node, ast.ClassDef):
                    outer += [d for d in [*node.args.defaults, *node.args.kw_defaults] if d is not None]
                stack.extend(outer)
                continue
            if isinstance(node, ast.Call) and self._is_construction(node):
                calls.append(node)
            stack.extend(ast.iter_child_nodes(node))
        return inner, calls

    def _is_construction(self, call: ast.Call) -> bool:
        if last_name(call.func) in self.names and not isinstance(call.func, ast.Subscript):
            return True
        # partial(TopK, ...) fixes arguments now and is called later
        return last_name(call.func) == "partial" and bool(call.args) and last_name(call.args[0]) in self.names

    def _judge(self, call: ast.Call, chain: list[Scope], unpacked: dict[ast.expr, set[Outcome]]) -> Site:
        partial = last_name(call.func) not in self.names
        name = last_name(call.args[0] if partial else call.func) or "?"
        bindings = Bindings(chain, self.classes, call.lineno)
        how, judged = self._layer(call, name, bindings, unpacked)
        if partial and judged is None:
            judged = Judgement(None, "may be passed when the partial is called")
        if judged is None:
            verdict, why = "missing", f"no {self.keyword} is passed"
            if how == "dictionary":
                shown = ", ".join(f"`**{_short(k.value)}`" for k in call.keywords if k.arg is None)
                why = f"no {self.keyword} in {shown} on at least one path"
        else:
            verdict = {True: "passed", False: "wrong", None: "unknown"}[judged.ok]
            why = f"{self.keyword} {judged.why}" if judged.ok is not None else judged.why
        return Site(self.path, call.lineno, call.col_offset + 1, name, verdict, how, why)

    def _layer(
        self, call: ast.Call, name: str, bindings: Bindings, unpacked: dict[ast.expr, set[Outcome]]
    ) -> tuple[How, Judgement | None]:
        """How the layer id arrives, and what is passed (None: nothing)."""
        for keyword in call.keywords:
            if keyword.arg == self.keyword:
                return "keyword", bindings.judge(keyword.value)
        index = self._position(name)
        args = call.args[1:] if last_name(call.func) == "partial" else call.args
        if index is not None:
            if any(isinstance(a, ast.Starred) for a in args[: index + 1]):
                return "positional", Judgement(None, "`*` arguments can not be followed")
            if len(args) > index:
                return "positional", bindings.judge(args[index])
        stars = [k.value for k in call.keywords if k.arg is None]
        if not stars:
            return "none", None
        # Several ** are disjoint at run time, so the key is there if one of them has it on every path.
        each = [unpacked.get(star, {Unknown("it is reached on no path")}) for star in stars]
        sure = next((o for o in each if all(isinstance(x, Present) for x in o)), None)
        outcomes = sure or set().union(*each)
        if sure is None and any(all(isinstance(x, Absent) for x in o) for o in each):
            outcomes = set().union(*(o for o in each if not all(isinstance(x, Absent) for x in o))) or {Absent()}
        if Absent() in outcomes:
            return "dictionary", None
        judged = [bindings.judge(o.node) if isinstance(o, Present) else Judgement(None, o.why) for o in outcomes]
        return "dictionary", worst(judged)

    def _position(self, name: str) -> int | None:
        """Index of the layer id among the positional parameters of the class, where the tree defines it so."""
        for info in self.classes.get(name, []):
            if info.positional and self.keyword in info.positional:
                return info.positional.index(self.keyword)
        return None


def _short(node: ast.expr, limit: int = 60) -> str:
    text = ast.unparse(node).replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 1] + "…"
