"""The command line: ``synkhronos`` and ``python -m synkhronos``, with ``run script.py``, ``info`` and ``top``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

_RUN = """execute a Python program as `python SCRIPT` would, in an environment in which GPUs work:
libgpuarray finds CUDA's libraries, Python finds the system's pygpu, Theano leaves cuDNN 8 and later alone"""
_INFO = """show what there is on this machine to compute with, what is missing, and the command that mends it;
the exit code is 0 if synkhronos can compute on CPU cores, else 1"""

_TOP = """show, until Ctrl-C, what each rank of this user's sessions is doing, its share of time waiting in the last
second, and its memory; nobody is asked or held up by that; the exit code is 1 if there is no session"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: ``sys.argv[1:]``.

    Returns
    -------
    int
        The exit code.

    Raises
    ------
    SystemExit
        After help and version, with code 0; for arguments that make no sense, with code 2.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"] and given[1:] and given[1] not in ("-h", "--help"):
        run(given[1:])  # all that follows is the program's: argparse would take what looks like an option
    options = make_parser().parse_args(given)
    if options.command == "run":
        make_parser().error("run: which program?")
    if options.command == "top":
        from synkhronos._top import top

        return top(options.once)
    return info(options.json)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser."""
    from synkhronos import __version__

    parser = argparse.ArgumentParser(prog=program_name(), description="Synkhronos: data-parallel Theano.")
    parser.add_argument("--version", action="version", version=f"Synkhronos {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = commands.add_parser("run", help="execute a Python program such that GPUs work", description=_RUN)
    running.usage = f"{parser.prog} run SCRIPT [ARGUMENT ...]\n       {parser.prog} run -m MODULE [ARGUMENT ...]"
    informing = commands.add_parser("info", help="show what there is to compute with", description=_INFO)
    informing.add_argument("--json", action="store_true", help="as JSON")
    watching = commands.add_parser("top", help="show what the ranks of running sessions do", description=_TOP)
    watching.add_argument("--once", action="store_true", help="one table, and no live view")
    return parser


def program_name() -> str:
    """The command as the user gave it."""
    name = os.path.basename(sys.argv[0])
    return "python -m synkhronos" if name == "__main__.py" else name


def run(program: list[str]) -> NoReturn:
    """Become a Python process that executes ``program`` ready for GPUs."""
    from synkhronos._machine import run as launch

    with open("/proc/self/cmdline", "rb") as file:
        command_line = [os.fsdecode(part) for part in file.read().split(b"\0")[:-1]]
    try:
        launch(program, command_line[: len(command_line) - len(sys.argv[1:])], search_path())
    except OSError as error:
        sys.exit(f"{program_name()} run: {error}")


def info(as_json: bool) -> int:
    """Print what there is; returns the exit code."""
    import json

    from synkhronos import __version__
    from synkhronos._machine import examine

    report = examine(__version__, os.environ, search_path())
    print(json.dumps(report.as_dict(), indent=2) if as_json else report.as_text())
    return 0 if report.ready["cpu"] else 1


def search_path() -> list[str]:
    """Return where programs find packages: this process's path, but what ``-m`` or the script has put first."""
    own = (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])))
    return [folder for index, folder in enumerate(sys.path) if index or folder not in own]


if __name__ == "__main__":
    sys.exit(main())
