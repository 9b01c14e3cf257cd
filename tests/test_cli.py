"""The command line: every row leads somewhere, and a wrong call says what is right."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tracklayer import cli
from tracklayer.errors import UserError


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_module(name: str):
    assert importlib.util.find_spec(cli.COMMANDS[name].module) is not None


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)
    assert cli.main([]) == 2


def test_unknown_command_names_the_known(capsys):
    assert cli.main(["srve"]) == 2
    err = capsys.readouterr().err
    assert "'srve'" in err and "demo-model" in err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tracklayer ")


def _command(monkeypatch, main) -> None:
    module = type(sys)("cli_probe")
    module.main = main
    monkeypatch.setitem(sys.modules, "cli_probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("cli_probe", "", "serve"))


def test_arguments_and_exit_status_pass_through(monkeypatch):
    _command(monkeypatch, lambda argv: len(argv))
    assert cli.main(["probe", "a", "b", "c"]) == 3
    _command(monkeypatch, lambda argv: None)
    assert cli.main(["probe"]) == 0


def test_a_user_error_is_one_line_without_a_traceback(monkeypatch, capsys):
    def main(argv):
        raise UserError("no such directory: 'x'; give one that exists")

    _command(monkeypatch, main)
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == "error: no such directory: 'x'; give one that exists\n"


def test_a_missing_extra_is_named_and_a_fault_of_ours_is_not_hidden(monkeypatch, capsys):
    def lacks(name: str):
        def main(argv):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return main

    _command(monkeypatch, lacks("torch"))
    assert cli.main(["probe"]) == 2
    assert "pip install 'tracklayer[serve]'" in capsys.readouterr().err
    _command(monkeypatch, lacks("tracklayer.misspelt"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["probe"])


def test_the_bare_command_loads_no_torch():
    code = "import sys; from tracklayer import cli; cli.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_idle_threads_sleep_unless_the_user_chose(monkeypatch):
    seen = []
    _command(monkeypatch, lambda argv: seen.append(os.environ["OMP_WAIT_POLICY"]))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    cli.main(["probe"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    cli.main(["probe"])
    assert seen == ["PASSIVE", "ACTIVE"]


def test_what_the_machine_refuses_is_an_error_not_a_traceback(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert cli.main(["demo-model", str(tmp_path / "file" / "model")]) == 2
    assert "error: " in capsys.readouterr().err


def test_bench_names_a_server_that_is_not_there(capsys):
    assert cli.main(["bench", "--shape", "tiny", "--url", "http://127.0.0.1:9"]) == 2
    assert "error: http://127.0.0.1:9" in capsys.readouterr().err
