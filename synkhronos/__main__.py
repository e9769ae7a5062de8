"""The command line: ``python -m synkhronos run script.py`` and ``python -m synkhronos info``."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

USAGE = """usage: python -m synkhronos run SCRIPT [ARGUMENT ...]
       python -m synkhronos run -m MODULE [ARGUMENT ...]
       python -m synkhronos info [--json]

run    execute a Python program as `python SCRIPT` would, in an environment in which GPUs work:
       libgpuarray finds CUDA's libraries, Python finds the system's pygpu, Theano leaves cuDNN 8 and later alone
info   show what there is on this machine to compute with, what is missing, and the command that mends it;
       the exit code is 0 if synkhronos can compute on CPU cores, else 1"""


def main(arguments: list[str]) -> int:
    """Execute the command line.

    Parameters
    ----------
    arguments : list of str
        ``sys.argv[1:]``.

    Returns
    -------
    int
        The exit code.
    """
    if arguments[:1] == ["run"] and arguments[1:] not in ([], ["-h"], ["--help"]):
        return run(arguments[1:])
    if arguments[:1] == ["info"] and arguments[1:] in ([], ["--json"]):
        return info(as_json="--json" in arguments)
    helping = bool({"-h", "--help"} & set(arguments))
    print(USAGE, file=sys.stdout if helping else sys.stderr)
    return 0 if helping else 2


def run(program: list[str]) -> NoReturn:
    """Become a Python process that executes ``program`` ready for GPUs."""
    from synkhronos._machine import run as launch

    with open("/proc/self/cmdline", "rb") as file:
        command_line = [os.fsdecode(part) for part in file.read().split(b"\0")[:-1]]
    try:
        launch(program, command_line[: len(command_line) - len(sys.argv[1:])], search_path())
    except OSError as error:
        sys.exit(f"python -m synkhronos run: {error}")


def info(as_json: bool) -> int:
    """Print what there is; returns the exit code."""
    import json

    from synkhronos import __version__
    from synkhronos._machine import examine

    report = examine(__version__, os.environ, search_path())
    print(json.dumps(report.as_dict(), indent=2) if as_json else report.as_text())
    return 0 if report.ready["cpu"] else 1


def search_path() -> list[str]:
    """Return where programs find packages: this process's path, without the folder that ``-m`` has put first."""
    return [folder for index, folder in enumerate(sys.path) if index or folder != os.getcwd()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
