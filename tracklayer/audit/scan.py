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

from tracklayer.audit.scan_module import Module, Site, Verdict
from tracklayer.audit.scan_scope import ClassInfo, index_class
from tracklayer.errors import UserError

SKIPPED_DIRS = frozenset({".git", ".venv", "venv", "node_modules", "__pycache__", ".tox", "build", "dist"})


@dataclass
class ScanResult:
    """All constructions of a tree, in path order.

    values      uses of a router class as a value (passed on, returned, stored): what they construct is not followed
    unreadable  (path, reason) of files that could not be parsed
    """

    root: str
    names: tuple[str, ...]
    keyword: str
    files: int = 0
    sites: list[Site] = field(default_factory=list)
    values: list[Site] = field(default_factory=list)
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
            "used_as_value": len(self.values),
            "unreadable": len(self.unreadable),
        }

    @property
    def status(self) -> int:
        """0: every construction passes its layer. 1: at least one does not. 2: at least one could not be decided."""
        if self.count("missing") or self.count("wrong"):
            return 1
        return 2 if self.count("unknown") or self.values or self.unreadable else 0


# what the parser raises (MemoryError: nested deeper than it can), and a walk of a tree as deep as it could
UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)


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
        except UNREADABLE as error:
            result.unreadable.append((shown, f"{type(error).__name__}: {error}"))
    if not result.files:
        raise UserError(f"no Python file under {str(root)!r}; give the directory of the engine's sources")
    wanted = _with_subclasses(set(names), classes)
    for shown, source in sources:  # parsed a second time: the trees of all files at once would fill gigabytes
        if any(name.encode() in source for name in wanted):
            try:
                module = Module(shown, _parse(source), wanted, classes, keyword)
            except UNREADABLE as error:
                result.unreadable.append((shown, f"{type(error).__name__}: {error}"))
                continue
            result.sites += module.sites
            result.values += module.values
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
