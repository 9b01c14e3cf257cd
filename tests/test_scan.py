"""The scan on small sources written here: every way a layer id can arrive, be lost, or be hidden in a dictionary."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tracklayer.audit.scan import ScanResult, scan
from tracklayer.audit.scan_cli import main, sarif
from tracklayer.errors import UserError


def source(body: str, signature: str = "self, layer_id, flag, xs, **kwargs") -> str:
    """A module whose class constructs routers in __init__ with `body` as its statements."""
    return (
        "class Block(Module):\n"
        f"    def __init__({signature}):\n"
        "        self.layer_id = layer_id\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8) + "\n"
    )


def scanned(tmp_path: Path, text: str, **options) -> ScanResult:
    (tmp_path / "m.py").write_text(text)
    return scan(tmp_path, **options)


def verdicts(tmp_path: Path, text: str, **options) -> list[str]:
    return [s.verdict for s in scanned(tmp_path, text, **options).sites]


# What is passed by keyword: (argument, verdict).
KEYWORDS = [
    ("layer_id", "passed"),
    ("self.layer_id", "passed"),
    ("layer_id + 1", "passed"),
    ("layer_id if flag else self.layer_id", "passed"),
    ("int(layer_id)", "passed"),
    ("None", "wrong"),
    ("True", "wrong"),
    ("'3'", "wrong"),
    ("3", "unknown"),
    ("-1", "unknown"),
    ("layer_id if flag else None", "wrong"),
    ("layr_id", "wrong"),
    ("self.layer_idx", "wrong"),
    ("layer_id + offset", "wrong"),
    ("kwargs['layer_id']", "unknown"),
    ("find_layer(xs)", "unknown"),
    ("flag.layer_id", "unknown"),
]


@pytest.mark.parametrize(("argument", "verdict"), KEYWORDS)
def test_keyword(tmp_path: Path, argument: str, verdict: str) -> None:
    result = scanned(tmp_path, source(f"self.topk = TopK(8, layer_id={argument})"))
    assert [(s.verdict, s.how) for s in result.sites] == [(verdict, "keyword")], result.sites


# How a dictionary is built before `TopK(**d)`: (statements, verdict).
DICTIONARIES = [
    ("d = dict(top_k=8, layer_id=layer_id)", "passed"),
    ("d = {'top_k': 8, 'layer_id': self.layer_id}", "passed"),
    ("d = {'top_k': 8}", "missing"),
    ("d = {'layer_id': None}", "wrong"),
    ("d = {'layer_id': typo}", "wrong"),
    ("d = {}\nd['layer_id'] = layer_id", "passed"),
    ("d = {}\nd['layer'] = layer_id", "missing"),
    ("d = {}\nd.update(layer_id=layer_id)", "passed"),
    ("d = {}\nd.update({'layer_id': layer_id})", "passed"),
    ("d = {}\nd.update([('layer_id', layer_id)])", "passed"),
    ("d = {'layer_id': layer_id}\nd.update(use_grouped_topk=False)", "passed"),
    ("d = {'layer_id': layer_id}\nd.update(layer_id=None)", "wrong"),
    ("a = {'layer_id': layer_id}\nd = {'top_k': 8, **a}", "passed"),
    ("a = {'layer_id': layer_id}\nd = {'top_k': 8} | a", "passed"),
    ("d = {'top_k': 8}\nd |= {'layer_id': layer_id}", "passed"),
    ("d = {'top_k': 8} | {'renormalize': flag}", "missing"),
    ("d = {}\nd.setdefault('layer_id', layer_id)", "passed"),
    ("d = {'layer_id': layer_id}\nd.pop('layer_id')", "missing"),
    ("d = {'layer_id': layer_id}\ndel d['layer_id']", "missing"),
    ("d = {'layer_id': layer_id}\nd.clear()", "missing"),
    ("d = {'layer_id': layer_id}\nd.pop('top_k', None)", "passed"),
    ("a = {'layer_id': layer_id}\nd = a.copy()\na.clear()", "passed"),
    ("a = {'layer_id': layer_id}\nd = a\na.clear()", "missing"),
    ("a = {}\nd = a\na['layer_id'] = layer_id", "passed"),
    ("d = {}\nif flag:\n    d['layer_id'] = layer_id", "missing"),
    ("d = {}\nif flag:\n    d['layer_id'] = layer_id\nelse:\n    d['layer_id'] = 1 + layer_id", "passed"),
    ("d = {}\nif flag:\n    d['layer_id'] = layer_id\nelse:\n    raise ValueError", "passed"),
    ("d = {'layer_id': layer_id} if flag else {}", "missing"),
    ("d = {'layer_id': layer_id} if flag else {'layer_id': layer_id, 'top_k': 2}", "passed"),
    ("d = {}\nfor x in xs:\n    d['layer_id'] = layer_id", "missing"),
    ("d = {}\nwhile True:\n    d['layer_id'] = layer_id\n    break", "missing"),  # not proven to run
    ("d = {'layer_id': layer_id}\nfor x in xs:\n    if x:\n        continue\n    d.pop('layer_id')", "missing"),
    ("d = {'layer_id': layer_id}\nfor x in xs:\n    d[0] = x", "passed"),
    ("try:\n    d = {'layer_id': layer_id}\nexcept KeyError:\n    d = {}", "missing"),
    ("d = {}\ntry:\n    d['layer_id'] = layer_id\nfinally:\n    print(d)", "passed"),
    ("d = {}\nwith flag:\n    d['layer_id'] = layer_id", "passed"),
    ("match flag:\n    case 1:\n        d = {'layer_id': layer_id}\n    case _:\n        d = {}", "missing"),
    ("(d := {'layer_id': layer_id})", "passed"),
    ("d = kwargs", "unknown"),
    ("d = xs", "unknown"),
    ("d = make(flag)", "unknown"),
    ("d = {}\nfill(d)", "unknown"),
    ("d = {'layer_id': layer_id}\nfill(d)", "unknown"),
    ("d = {'layer_id': layer_id}\nprint(d, len(d))", "passed"),
    ("d = {}\nd[flag] = 1", "unknown"),
    ("d = {'layer_id': layer_id}\nd[flag] = 1", "passed"),
    ("d = {flag: 1}", "unknown"),
    ("d = {k: 1 for k in xs}", "unknown"),
    ("d = {}\ndef later():\n    d['layer_id'] = layer_id", "unknown"),
    ("d = {}\nself.d = d", "unknown"),
    ("d, e = xs", "unknown"),
    ("global d", "unknown"),
    ("d = {**kwargs, 'layer_id': layer_id}", "passed"),
    ("d = {'layer_id': layer_id, **flag}", "unknown"),
]


@pytest.mark.parametrize(("body", "verdict"), DICTIONARIES)
def test_dictionary(tmp_path: Path, body: str, verdict: str) -> None:
    signature = "self, layer, flag, xs, **kwargs"
    text = source(body + "\nself.topk = TopK(**d)", signature).replace("= layer_id\n", "= layer_id = layer\n", 1)
    result = scanned(tmp_path, text)
    assert [(s.verdict, s.how) for s in result.sites] == [(verdict, "dictionary")], result.sites


def test_the_dictionary_of_the_moment_counts(tmp_path: Path) -> None:
    body = "d = {}\nself.a = TopK(**d)\nd['layer_id'] = layer_id\nself.b = TopK(**d)\nd = {}\nself.c = TopK(**d)"
    assert verdicts(tmp_path, source(body)) == ["missing", "passed", "missing"]


def test_a_second_round_of_a_loop_counts(tmp_path: Path) -> None:
    body = "d = {'layer_id': layer_id}\nfor x in xs:\n    self.topk = TopK(**d)\n    d.pop('layer_id')"
    assert verdicts(tmp_path, source(body)) == ["missing"]


def test_several_dictionaries(tmp_path: Path) -> None:
    good = "a = {'layer_id': layer_id}\nb = {}\n"
    assert verdicts(tmp_path, source(good + "TopK(**b, **a)")) == ["passed"]
    assert verdicts(tmp_path, source(good + "TopK(**b, **b)")) == ["missing"]
    assert verdicts(tmp_path, source(good + "TopK(**b, **kwargs)", "self, layer_id, **kwargs")) == ["missing"]
    assert verdicts(tmp_path, source("TopK(**({'a': 1} if flag else {}), layer_id=layer_id)")) == ["passed"]
    assert verdicts(tmp_path, source("TopK(8, **({'a': 1} if flag else {}))")) == ["missing"]


def test_a_named_parameter_never_arrives_in_kwargs(tmp_path: Path) -> None:
    text = (
        "def build(layer_id, **kwargs):\n    return TopK(**kwargs)\ndef other(**kwargs):\n    return TopK(**kwargs)\n"
    )
    assert verdicts(tmp_path, text) == ["missing", "unknown"]


def test_names_of_enclosing_scopes(tmp_path: Path) -> None:
    text = """
        LAYER = 3
        def outer(layer_id):
            def inner():
                return TopK(8, layer_id=layer_id)
            return [TopK(8, layer_id=i) for i in range(4)], inner, lambda n: TopK(8, layer_id=n)
        class A(Module):
            layer = 1
            def f(self):
                return TopK(8, layer_id=layer)
            def g(self):
                return TopK(8, layer_id=self.layer)
        top = TopK(8, layer_id=LAYER)
    """
    result = scanned(tmp_path, textwrap.dedent(text))
    assert [(s.line, s.verdict) for s in result.sites] == [
        (5, "passed"),
        (6, "passed"),
        (6, "passed"),
        (10, "wrong"),  # a method does not see the names of its class body
        (12, "passed"),
        (13, "unknown"),  # a constant is right for one router only
    ]


def test_attributes_of_bases_and_later_lines(tmp_path: Path) -> None:
    text = """
        class Base(Module):
            def __init__(self, layer_id):
                self.layer_id = layer_id
        class Good(Base):
            def __init__(self, n):
                self.topk = TopK(8, layer_id=self.layer_id)
        class Elsewhere(FarBase):
            def __init__(self, n):
                self.topk = TopK(8, layer_id=self.layer_id)
        class Late(Module):
            def __init__(self, layer_id):
                self.topk = TopK(8, layer_id=self.layer_id)
                self.layer_id = layer_id
        class Never(Module):
            def __init__(self, layer_id):
                self.topk = TopK(8, layer_id=self.layer_id)
    """
    result = scanned(tmp_path, textwrap.dedent(text))
    assert [s.verdict for s in result.sites] == ["passed", "unknown", "wrong", "wrong"]
    assert "assigned only later, on line 14" in result.sites[2].why


def test_other_names_of_the_class(tmp_path: Path) -> None:
    text = """
        from moe import TopK as Router
        import moe
        Alias = Router
        class Hash(moe.TopK): pass
        def f(layer_id):
            return Router(8), Alias(8), moe.TopK(8), Hash(8), partial(TopK, 8), partial(TopK, layer_id=layer_id)
        def g():
            return topk(8), obj.topk(8), TopKConfig(8), isinstance(1, TopK)
    """
    result = scanned(tmp_path, textwrap.dedent(text))
    assert [s.verdict for s in result.sites] == ["missing"] * 4 + ["unknown", "passed"]


def test_a_class_chosen_first_and_constructed_later(tmp_path: Path) -> None:
    text = """
        def f(layer_id, flag):
            kind = HashTopK if flag else TopK
            return kind(8, layer_id=layer_id), kind(8)
        def other(kind):
            return kind(8)
        class A:
            router = TopK
            def f(self):
                return self.router(8)
    """
    result = scanned(tmp_path, textwrap.dedent(text))
    assert [(s.line, s.verdict) for s in result.sites] == [(4, "passed"), (4, "missing"), (10, "missing")]
    assert not result.values


def test_a_class_used_as_a_value_is_listed(tmp_path: Path) -> None:
    text = """
        ROUTERS = {"plain": TopK}
        def f(layer_id, x) -> Optional[TopK]:
            build(TopK, 8)
            return TopK
        def g(x: TopK):
            y: TopK = x
            return isinstance(x, (TopK, int)) or type(x) is TopK or TopK.forward or cast(TopK, x)
    """
    result = scanned(tmp_path, textwrap.dedent(text))
    assert not result.sites and [v.line for v in result.values] == [2, 4, 5]
    assert result.status == 2


def test_defaults_and_decorators_belong_outside(tmp_path: Path) -> None:
    text = "def f(layer_id):\n    def g(r=TopK(8)): pass\n    @wrap(TopK(8, layer_id=layer_id))\n    def h(): pass\n"
    assert verdicts(tmp_path, text) == ["missing", "passed"]


def test_configured_names_and_keyword(tmp_path: Path) -> None:
    text = "def f(layer):\n    Gate(layer_idx=layer), Gate(), TopK()\n"
    assert verdicts(tmp_path, text, names=("Gate",), keyword="layer_idx") == ["passed", "missing"]


def test_positional_where_the_class_says_so(tmp_path: Path) -> None:
    text = """
        class TopK:
            def __init__(self, top_k, layer_id=None): ...
        def f(n, xs):
            TopK(8, n), TopK(8), TopK(8, None), TopK(*xs)
    """
    result = scanned(tmp_path, textwrap.dedent(text))
    assert [s.verdict for s in result.sites] == ["passed", "missing", "wrong", "unknown"]
    assert result.sites[0].how == "positional"


def test_sums_and_status(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("def f(layer_id):\n    TopK(layer_id=layer_id)\n    TopK(**{'k': 1})\n")
    (tmp_path / "b.py").write_text("def f(d):\n    TopK(**d)\n")
    result = scan(tmp_path)
    assert result.sums == {
        "files": 2,
        "constructions": 3,
        "without_literal_keyword": 2,
        "through_dictionary": 2,
        "passed": 1,
        "missing": 1,
        "wrong": 0,
        "unknown": 1,
        "used_as_value": 0,
        "unreadable": 0,
    }
    assert result.status == 1
    assert scan(tmp_path / "b.py").status == 2  # undecided is neither clean nor a finding
    (tmp_path / "sub" / "a.py").write_text("def f(layer_id):\n    TopK(layer_id=layer_id)\n")
    assert scan(tmp_path / "sub").status == 0
    (tmp_path / "sub" / "c.py").write_text("def f(:\n")
    assert scan(tmp_path / "sub").status == 2
    (tmp_path / "sub" / "build").mkdir()
    (tmp_path / "sub" / "build" / "d.py").write_text("TopK()\n")
    assert scan(tmp_path / "sub").files == 2  # build output is not source


@pytest.mark.parametrize(
    ("options", "says"),
    [({"names": ("Top-K",)}, "not a Python name"), ({"names": ()}, "no class name"), ({"keyword": ""}, "not a Python")],
)
def test_bad_options(tmp_path: Path, options: dict, says: str) -> None:
    (tmp_path / "m.py").write_text("pass")
    with pytest.raises(UserError, match=says):
        scan(tmp_path, **options)


@pytest.mark.parametrize(
    "source",
    ["(" * 5000 + ")" * 5000, "x = " + "-" * 20000 + "1", "TopK" + ".a" * 3000 + "()", "\0", "def ("],
    ids=["brackets", "signs", "attributes", "null", "syntax"],
)
def test_a_file_that_can_not_be_parsed_hides_no_other(tmp_path: Path, source: str) -> None:
    (tmp_path / "a.py").write_text(source)
    (tmp_path / "b.py").write_text("TopK(top_k=2)")
    result = scan(tmp_path)
    assert result.count("missing") == 1 and result.status == 1


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.py").write_text("def f(layer_id, d):\n    TopK(layer_id=layer_id)\n    TopK(8)\n    TopK(**d)\n")
    assert main([str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "m.py:3:5: missing: TopK: no layer_id is passed" in text and "m.py:2:" not in text
    assert "3 constructions of TopK in 1 files; 2 without a literal layer_id keyword, 1 of these through" in text
    assert main([str(tmp_path), "--verbose"]) == 1
    assert "m.py:2:5: passed" in capsys.readouterr().out
    assert main([str(tmp_path), "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert (read["status"], [s["verdict"] for s in read["sites"]]) == (1, ["passed", "missing", "unknown"])
    assert main([str(tmp_path), "--name", "Router"]) == 0
    capsys.readouterr()
    assert main([str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert "no Python file" in capsys.readouterr().err


def test_sarif_has_what_the_standard_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.py").write_text("def f(d):\n    TopK(8)\n    TopK(**d)\n")
    (tmp_path / "n.py").write_text("def (\n")
    assert main([str(tmp_path), "--sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    assert log == sarif(scan(tmp_path))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0" and "sarif-2.1.0" in log["$schema"]
    rules = run["tool"]["driver"]["rules"]
    assert [r["ruleId"] for r in run["results"]] == ["missing", "unknown", "unreadable"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning") and result["message"]["text"]
        place = result["locations"][0]["physicalLocation"]
        assert not place["artifactLocation"]["uri"].startswith("/")
        assert place["region"]["startLine"] >= 1 and place["region"]["startColumn"] >= 1


def test_our_own_tree_is_clean() -> None:
    package = Path(__file__).resolve().parent.parent / "tracklayer"
    result = scan(package)
    assert result.status == 0, result.sums
    assert [s.path for s in result.sites] == ["layers/moe.py"]


def test_needs_the_standard_library_only(tmp_path: Path) -> None:
    """In an interpreter that refuses every third-party import, numpy too."""
    (tmp_path / "m.py").write_text("def f(layer_id):\n    TopK(layer_id=layer_id)\n")
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] not in sys.stdlib_module_names | {{'tracklayer'}}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from tracklayer.audit.scan_cli import main
sys.exit(main([{str(tmp_path)!r}]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
