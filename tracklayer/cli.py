"""The command line: one row a command; a command's module is imported only when it is called."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

from tracklayer import __version__
from tracklayer.config import sleep_while_waiting
from tracklayer.errors import TracklayerError


@dataclass(frozen=True, slots=True)
class Command:
    """`module` holds `main(argv) -> int | None`; `extra` is the install that brings what it imports."""

    module: str
    help: str
    extra: str | None = None


COMMANDS = {
    "serve": Command("tracklayer.server.launch", "serve a model over HTTP", "serve"),
    "demo": Command("tracklayer.demo.job", "serve the demonstration model, ask it, check every route", "demo"),
    "demo-model": Command("tracklayer.demo.model", "write the demonstration model's checkpoint directory", "demo"),
    "bench": Command("tracklayer.bench.cli", "measure throughput, latency and the cost of recording", "serve"),
    "tune": Command("tracklayer.bench.tune", "find the expert kernels' tiles for a model's shape on this GPU", "serve"),
    "models": Command("tracklayer.models.listing", "list the model families that are served", "serve"),
    "audit": Command("tracklayer.audit.cli", "compare routes of any engine with a reference model", "audit"),
    "scan": Command("tracklayer.audit.scan_cli", "find routers that are built without a layer id in a source tree"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return f"usage: tracklayer COMMAND [arguments]\n\n{rows}\n\ntracklayer COMMAND --help tells a command's arguments."


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 2 wrong input, else the command's own."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in ([], ["-h"], ["--help"], ["help"]):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"tracklayer {__version__}")
        return 0
    command = COMMANDS.get(argv[0])
    if command is None:
        print(f"unknown command {argv[0]!r}\n{usage()}", file=sys.stderr)
        return 2
    sleep_while_waiting()
    try:
        return importlib.import_module(command.module).main(argv[1:]) or 0
    except ModuleNotFoundError as error:
        # Ours missing is a fault of ours; another's missing is an install that lacks an extra.
        if command.extra is None or (error.name or "").startswith("tracklayer"):
            raise
        print(f"error: {error.name} is not installed: pip install 'tracklayer[{command.extra}]'", file=sys.stderr)
        return 2
    except (TracklayerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
