"""The rules of the house, as tests: imports point one way, caps hold, a route has one birthplace.

Most are read from the syntax tree; what a module loads is tried in a fresh interpreter. That every family is compared
with a model that is not ours stands in test_families.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tracklayer"
FILES = sorted(p for p in PACKAGE.rglob("*.py"))
ALL_FILES = [*FILES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]

FILE_LINES, FUNCTION_LINES, FAMILY_LINES = 400, 80, 150

# What a part of the package may import of the others; errors is everyone's.
MAY_IMPORT = {
    "errors": set(),
    "types": set(),
    "config": set(),
    "kernels": set(),
    "layers": {"kernels", "config"},
    "models": {"layers", "kernels", "config"},
    "routes": {"kernels"},
    "runner": {"models", "layers", "routes", "kernels", "types", "config"},
    "scheduler": {"types"},
    "engine": {"runner", "scheduler", "routes", "types", "config"},
    "server": {"engine", "routes", "types", "config"},
    "replay": {"routes", "kernels", "config"},
    "audit": {"routes", "replay", "config"},
    "rl": {"engine", "replay", "routes", "types", "config"},
    "bench": {"engine", "runner", "models", "layers", "kernels", "types", "config"},
    "demo": {"server", "engine", "replay", "routes", "types", "config"},
}
# What a part may import from outside the standard library; parts not named here may import anything.
THIRD_PARTY = {
    "errors": {"numpy"},
    "types": {"numpy"},
    "config": {"numpy"},
    "kernels": {"numpy", "torch", "triton"},
    "layers": {"torch"},
    "scheduler": {"numpy"},
}
# Modules that must not load torch, and of these the ones that numpy alone must serve.
NUMPY_ONLY = [
    "tracklayer",
    "tracklayer.cli",
    "tracklayer.config",
    "tracklayer.errors",
    "tracklayer.types",
    "tracklayer.routes",
    "tracklayer.routes.codec",
    "tracklayer.routes.record",
    "tracklayer.scheduler.scheduler",
]
NO_TORCH = ["tracklayer.engine.client", "tracklayer.engine.frontend"]
# The router's reference and its kernels, and the layer that calls them.
ROUTING_BIRTHPLACES = {"layers/router.py"} | {f"kernels/{name}.py" for name in ("topk", "select", "route", "route_few")}
ROUTERS = {"TopK", "HashTopK"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def nodes(kind: type | tuple[type, ...]) -> Iterator[tuple[Path, ast.AST]]:
    for path in FILES:
        yield from ((path, node) for node in ast.walk(tree_of(path)) if isinstance(node, kind))


def part_of(module: str) -> str:
    """tracklayer.layers.moe -> layers; the package itself and its top files -> their own name."""
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions too; those for type checkers alone left out."""
    unseen = {
        id(inner)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree_of(path)):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are absolute here"
            if node.module == "tracklayer":
                yield from ((node.lineno, f"tracklayer.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def is_call_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and (
        (isinstance(node.func, ast.Name) and node.func.id in names)
        or (isinstance(node.func, ast.Attribute) and node.func.attr in names)
    )


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def report(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


def test_the_checks_look_at_something():
    assert len(FILES) > 20
    assert {name_of(p) for p in FILES} >= ROUTING_BIRTHPLACES


def test_imports_point_one_way():
    found = []
    for path in FILES:
        part = name_of(path).split("/")[0].removesuffix(".py")
        if part not in MAY_IMPORT:
            assert part in {"__init__", "cli", "launch_server"}, f"{part}: give it a row in MAY_IMPORT"
            continue
        for line, module in imports_of(path):
            if module.startswith("tracklayer."):
                wrong = part_of(module) not in MAY_IMPORT[part] | {part, "errors"}
            else:
                top = module.split(".")[0]
                wrong = top not in THIRD_PARTY.get(part, {top}) | sys.stdlib_module_names
            if wrong:
                found.append(f"{name_of(path)}:{line}: {part} must not import {module}")
    report(found)


def test_layers_know_no_requests_and_the_server_no_engine_internals():
    found = []
    for path in FILES:
        name = name_of(path)
        for line, module in imports_of(path):
            if name.startswith("server/") and name != "server/launch.py" and module == "tracklayer.engine.engine":
                found.append(f"{name}:{line}: the server knows the engine by its client alone")
            if (
                name.startswith("routes/")
                and name != "routes/pool.py"
                and module.startswith(("torch", "tracklayer.kernels"))
            ):
                found.append(f"{name}:{line}: only the pool may need torch")
    report(found)


LOADER = """
import importlib, sys
allowed = set(sys.stdlib_module_names) | {{"tracklayer"}} | {allowed}
class Gate:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if {refuse}:
            raise {error}(f"{{name}} was imported")
sys.meta_path.insert(0, Gate())
importlib.import_module("{module}")
"""


def load_alone(module: str, allowed: str, refuse: str, error: str) -> None:
    code = LOADER.format(module=module, allowed=allowed, refuse=refuse, error=error)
    result = subprocess.run([sys.executable, "-S", "-c", SITE + code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


# -S keeps start-up hooks of other installed packages from loading anything; their folder is then added by hand.
SITE = f"import sys; sys.path.extend({[p for p in sys.path if p.endswith('site-packages')]!r})\n"


@pytest.mark.parametrize("module", NUMPY_ONLY)
def test_needs_numpy_alone(module: str):
    load_alone(module, "{'numpy'}", "top not in allowed", "ModuleNotFoundError")


@pytest.mark.parametrize(
    "module",
    NO_TORCH
    + [f"tracklayer.server.{p.stem}" for p in sorted((PACKAGE / "server").glob("*.py")) if p.stem != "__init__"],
)
def test_loads_no_torch(module: str):
    load_alone(module, "set()", "top in ('torch', 'triton')", "AssertionError")


def test_files_stay_small():
    caps = [(p, FAMILY_LINES if "families" in p.parts else FILE_LINES) for p in ALL_FILES]
    sizes = [(p, len(p.read_text().splitlines()), cap) for p, cap in caps]
    report([f"{p.relative_to(ROOT)}: {size} lines, the cap is {cap}" for p, size, cap in sizes if size > cap])


def test_functions_stay_small():
    found = []
    for path, node in nodes((ast.FunctionDef, ast.AsyncFunctionDef)):
        lines = (node.end_lineno or 0) - node.lineno + 1
        # A kernel is one function by nature of its compiler; its file's cap bounds it.
        if lines > FUNCTION_LINES and not is_kernel(node):
            found.append(f"{name_of(path)}:{node.lineno}: {node.name} has {lines} lines, the cap is {FUNCTION_LINES}")
    report(found)


def test_every_file_says_what_it_holds():
    report(
        [f"{name_of(p)}: no module docstring" for p in FILES if p.stat().st_size and not ast.get_docstring(tree_of(p))]
    )


def test_routers_are_built_in_one_place_with_their_layer():
    """TopK and HashTopK are used as a value in layers/moe.py alone, once each, in a call that passes layer_id."""
    uses = []
    for path in FILES:
        tree = tree_of(path)
        elsewhere = {
            id(inner)
            for node in ast.walk(tree)
            for outer in (
                node.bases
                if isinstance(node, ast.ClassDef)
                else [node.annotation]
                if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation
                else [node.returns]
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns
                else node.args
                if is_call_of(node, {"isinstance"})
                else []
            )
            for inner in ast.walk(outer)
        }
        for node in ast.walk(tree):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            if name in ROUTERS and id(node) not in elsewhere:
                uses.append((name_of(path), name))
    assert sorted(uses) == [("layers/moe.py", "HashTopK"), ("layers/moe.py", "TopK")]
    calls = [n for n in ast.walk(tree_of(PACKAGE / "layers" / "moe.py")) if isinstance(n, ast.Call)]
    built = [c for c in calls if any(k.arg == "layer_id" for k in c.keywords)]
    assert len(built) == 1 and isinstance(built[0].keywords[0].value, ast.Name), "one construction, layer_id by name"


def test_a_routing_is_born_in_the_router_alone():
    calls = {name_of(p) for p, node in nodes(ast.Call) if is_call_of(node, {"Routing"})}
    assert calls, "nobody builds a Routing"
    report([f"{name}: builds a Routing" for name in sorted(calls - ROUTING_BIRTHPLACES)])


def test_no_global_state():
    report([f"{name_of(p)}:{n.lineno}: global {', '.join(n.names)}" for p, n in nodes(ast.Global)])


def test_the_environment_is_read_in_config_alone():
    found = []
    for path, node in nodes((ast.Attribute, ast.Name)):
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        if name in {"environ", "getenv"} and name_of(path) != "config.py":
            found.append(f"{name_of(path)}:{node.lineno}: {name}")
    report(found)


def test_no_broad_except_swallows():
    found = []
    for path, node in nodes(ast.ExceptHandler):
        kinds = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"BaseException"}
        raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        if kinds & {"Exception", "BaseException"} and not raises:
            found.append(f"{name_of(path)}:{node.lineno}: catches everything and does not raise again")
    report(found)


def kernel_functions() -> dict[str, ast.FunctionDef]:
    """Module-level functions of kernels/ that Python calls, by name (no name stands twice)."""
    found: dict[str, ast.FunctionDef] = {}
    for path in sorted((PACKAGE / "kernels").glob("*.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not is_kernel(node):
                assert node.name not in found, f"{node.name} stands twice in kernels/"
                found[node.name] = node
    return found


def launches(function: ast.FunctionDef) -> bool:
    """Whether a function launches a Triton kernel: some_kernel[grid](...)."""
    launched = (
        n.func.value for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)
    )
    return any(isinstance(name, ast.Name) and "kernel" in name.id for name in launched)


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every variable, attribute and imported name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name.split(".")[-1]


def users_of_kernel_functions() -> dict[str, set[str]]:
    """Which functions of kernels/ name which others, private ones included."""
    users: dict[str, set[str]] = {}
    for path in (PACKAGE / "kernels").glob("*.py"):
        for outer in tree_of(path).body:
            if isinstance(outer, ast.FunctionDef):
                for name in names_in(outer):
                    users.setdefault(name, set()).add(outer.name)
    return users


def test_every_launcher_has_a_reference():
    """Each function that launches a kernel, or an op that leads to it, has a `_ref` twin in torch."""
    functions, users = kernel_functions(), users_of_kernel_functions()
    found = []
    for name, node in functions.items():
        reached, front = {name}, {name}
        while front:
            front = {user for f in front for user in users.get(f, ())} - reached
            reached |= front
        if launches(node) and not any(f"{op}_ref" in functions for op in reached):
            found.append(f"{name} launches a kernel but nothing that leads to it has a _ref")
    report(found)


def arguments(function: ast.FunctionDef) -> dict[str, str]:
    """Each argument by name, with its default; `config` (tile sizes of a tuned op) left out."""
    args = function.args
    places = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(places) - len(args.defaults)) + list(args.defaults)
    pairs = [*zip(places, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return {arg.arg: ast.unparse(default) if default else "" for arg, default in pairs if arg.arg != "config"}


def test_reference_and_op_take_the_same_arguments():
    """An op may take further ones at the end, with defaults: hints that make it faster and change no result."""
    functions = kernel_functions()
    refs = [name for name in functions if name.endswith("_ref")]
    assert refs
    found = []
    for ref in refs:
        op = ref.removesuffix("_ref")
        if op not in functions:
            found.append(f"{ref} has no {op}")
            continue
        ours, theirs = list(arguments(functions[op]).items()), list(arguments(functions[ref]).items())
        if ours[: len(theirs)] != theirs or not all(default for _, default in ours[len(theirs) :]):
            found.append(f"{op}{ours} but {ref}{theirs}")
    report(found)


def test_every_op_is_tested():
    """A test names it, its launcher or its reference."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    words = {name for path in tests for name in names_in(tree_of(path))}
    ops = [name.removesuffix("_ref") for name in kernel_functions() if name.endswith("_ref")]
    report([f"no test names {op}" for op in ops if not words & {op, f"{op}_ref", f"launch_{op}"}])


def test_the_tests_that_the_docs_name_are_there():
    named = re.findall(
        r"`(?:tests/)?([\w/]+\.py)::(\w+)`", "\n".join(p.read_text() for p in (ROOT / "docs").glob("*.md"))
    )
    assert named
    report([f"tests/{file} has no {test}" for file, test in named if test not in defined_in(ROOT / "tests" / file)])


def defined_in(path: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {n.name for n in ast.walk(tree_of(path)) if isinstance(n, kinds)} if path.is_file() else set()
