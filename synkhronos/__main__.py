"""Command line: ``synkhronos`` and ``python -m synkhronos``, with the commands ``run``, ``info``, ``top``, ``plan``."""

from __future__ import annotations

import argparse
import difflib
import os
import select
import signal
import sys
from collections.abc import Sequence

_RUN = """execute a Python program as `python SCRIPT` would, in an environment in which GPUs work: libgpuarray
finds CUDA's libraries, Python finds the system's pygpu, Theano does not use cuDNN 8 and later; with --hosts, start it
on these nodes, by the mpiexec of the MPI that mpi4py uses"""
_INFO = """show what this machine can compute with, what is missing, and the commands that install it; the
exit code is 0 if synkhronos can compute on CPU cores, else 1"""

_TOP = """show, until Ctrl-C, what each rank of this user's sessions is doing, its share of time waiting in the last
second, its memory and its program, without interrupting the ranks; the exit code is 1 if there is no session, and 3 if
the live view cannot be shown because rich is missing"""

_PLAN = """execute a Python program until it has called a function of Synkhronos some times, measure this function, and
predict its steps on other numbers of nodes, ranks and rows, with the error of the model; no step of the measurement
remains in the program's variables"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: ``sys.argv[1:]``.

    Returns
    -------
    int
        The exit code; 141, that of a program that SIGPIPE has ended, if the reader of the output ends first, as in
        ``synkhronos info | head -1``.

    Raises
    ------
    SystemExit
        With code 0 after help and version, and with code 2 for invalid arguments.
    """
    try:
        try:
            code = execute(arguments)
        except SystemExit:
            print(end="", flush=True)
            raise
        print(end="", flush=True)
    except BrokenPipeError:
        if not is_reader_gone():  # of the program that `plan` executes
            raise
        return 128 + signal.SIGPIPE
    return code


def is_reader_gone() -> bool:
    """Return whether nothing reads standard output; if so, write the rest of it to /dev/null."""
    poll, output = select.poll(), sys.stdout.fileno()
    poll.register(output, 0)  # errors are always reported
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True


def execute(arguments: Sequence[str] | None) -> int:
    """Execute the command line; return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    own = count_own_options(given[1:])
    if given[:1] == ["run"] and given[1 + own :] and given[1 + own] not in ("-h", "--help"):
        options = make_parser().parse_args(given[: 1 + own])
        check_option(given[1 + own], options.parser)
        return run(given[1 + own :], options.hosts, options.verbose)  # the program and its own options
    if given[:1] == ["plan"]:
        return plan(given)
    options, others = make_parser().parse_known_args(given)
    if others:
        options.parser.error(f"unrecognized arguments: {' '.join(others)}")
    if options.command == "run":
        options.parser.error(f"got no program; use {program_name()} run SCRIPT [ARGUMENT ...]")
    if options.command == "top":
        from synkhronos._cli.top import top

        return top(options.once)
    return info(options.json, options.gpu)


def make_parser() -> argparse.ArgumentParser:
    """Make the argument parser; the results have the parser of their command as `parser`."""
    from synkhronos import __version__

    parser = argparse.ArgumentParser(
        prog=program_name(), description="Synkhronos: data-parallel PyMC, PyTensor and Theano."
    )
    parser.add_argument("--version", action="version", version=f"Synkhronos {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = commands.add_parser("run", help="execute a program with GPUs, or on several nodes", description=_RUN)
    ways = ("SCRIPT", "-m MODULE", "--hosts A,B[:N] [--verbose] SCRIPT")
    running.usage = "\n       ".join(f"{parser.prog} run {way} [ARGUMENT ...]" for way in ways)
    running.add_argument("--hosts", help="host names with commas between them; :N for N processes on a host")
    running.add_argument("--verbose", action="store_true", help="print the command that starts the program")
    informing = commands.add_parser("info", help="show what this machine can compute with", description=_INFO)
    informing.add_argument("--json", action="store_true", help="print JSON")
    informing.add_argument("--gpu", action="store_true", help="also show what GPUs need, if there is no NVIDIA driver")
    watching = commands.add_parser("top", help="show what the ranks of running sessions do", description=_TOP)
    watching.add_argument("--once", action="store_true", help="print one table, without a live view")
    planning = commands.add_parser(
        "plan", help="predict a program's steps on other numbers of ranks", description=_PLAN, allow_abbrev=False
    )
    planning.usage = f"{parser.prog} plan SCRIPT [OPTION ...] [ARGUMENT ...]"
    planning.add_argument("script", metavar="SCRIPT")
    planning.add_argument("--nodes", help="numbers of nodes, such as 4, 1,3 or 1-64 (powers of 2 times the first)")
    planning.add_argument("--ranks", help="numbers of ranks on each node; default: 1 to those of the session")
    planning.add_argument("--batch", help="numbers of rows of all ranks in a step; default: those of the program")
    planning.add_argument("--line", help="link between nodes, such as 10Gbit; default: measured on several nodes")
    planning.add_argument("--rule", help="training rules with commas between them, such as bsp,local:16")
    planning.add_argument("--slow", help="slow ranks, such as 1x5 for one that takes five times as long")
    planning.add_argument("--machine", metavar="FILE", help="another machine, as --machine-out writes one")
    planning.add_argument("--machine-out", metavar="FILE", help="also write the numbers of this machine to a file")
    planning.add_argument("--csv", metavar="FILE", help="also write the predictions to a file")
    planning.add_argument("--plot", metavar="FILE", help="also draw them; the suffix selects the format")
    for one in (running, informing, watching, planning):
        one.set_defaults(parser=one)
    return parser


def plan(words: Sequence[str]) -> int:
    """Execute the command ``plan``; words after ``--``, and options that it does not know, are the program's own."""
    words = list(words)
    end = words.index("--") if "--" in words else len(words)
    given, others = make_parser().parse_known_args(words[:end])
    from synkhronos._cli import plan_program, watch_program

    name, program = program_name(), [given.script, *others, *words[end + 1 :]]
    try:
        watch = watch_program(program, given)
    except (OSError, ValueError, ImportError) as error:
        return failed("plan", error)
    code = plan_program(watch, program, given)  # exceptions of the program are not caught
    return code if watch.error is None else sys.exit(f"{name} plan: {watch.error}")


def failed(command: str, error: Exception) -> int:
    """Print why a command cannot begin; return the exit code: 2 for a wrong value, 1 for what the machine lacks."""
    print(f"{program_name()} {command}: {error}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, ValueError) else 1


def program_name() -> str:
    """Return the command as the user typed it."""
    name = os.path.basename(sys.argv[0])
    return "python -m synkhronos" if name == "__main__.py" else name


def count_own_options(words: Sequence[str]) -> int:
    """Count the words after ``run`` that are options of ``run``, not of the program.

    >>> count_own_options(["--hosts", "a,b", "--verbose", "script.py", "--verbose"])
    3
    """
    count = 0
    while words[count:]:
        if words[count] == "--hosts":
            count += 2
        elif words[count] == "--verbose" or words[count].startswith("--hosts="):
            count += 1
        else:
            break
    return count


def check_option(word: str, parser: argparse.ArgumentParser) -> None:
    """Exit with an error if a word is a misspelled option of ``run``, which Python would get and not know."""
    name = word.partition("=")[0]
    close = difflib.get_close_matches(name, ["--hosts", "--verbose"], cutoff=0.75) if name.startswith("--") else []
    if close and name != "--version":
        parser.error(f"unknown option {name}; did you mean {close[0]}?")


def run(program: list[str], hosts: str | None, verbose: bool) -> int:
    """Replace this process by Python executing ``program`` in an environment for GPUs, or start it on ``hosts``."""
    from synkhronos._cli import run as launch
    from synkhronos._cli import run_on

    with open("/proc/self/cmdline", "rb") as file:
        command_line = [os.fsdecode(part) for part in file.read().split(b"\0")[:-1]]
    command_line = command_line[: len(command_line) - len(sys.argv[1:])]
    try:
        if hosts is None:
            launch(program, command_line, search_path())
        code, culprit = run_on(hosts, program, command_line, verbose)
    except (OSError, ValueError) as error:
        return failed("run", error)
    if culprit:
        print(f"{program_name()} run: {culprit}", file=sys.stderr, flush=True)
    return code


def info(as_json: bool, gpus_too: bool) -> int:
    """Print a report about this computer; returns the exit code."""
    import json

    from synkhronos import __version__
    from synkhronos._cli import examine

    report = examine(__version__, os.environ, search_path(), gpus_too)
    print(json.dumps(report.as_dict(), indent=2) if as_json else report.as_text())
    return 0 if report.ready["cpu"] else 1


def search_path() -> list[str]:
    """Return the search path of programs: that of this process, without the first entry from ``-m`` or the script."""
    own = (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])))
    return [folder for index, folder in enumerate(sys.path) if index or folder not in own]


if __name__ == "__main__":
    sys.exit(main())
