"""``python -m synkhronos plan``: execute a program until it has called a function often enough, and predict its steps.

The program is executed unchanged, in this process. Calls of functions of Synkhronos are counted. The function that is
measured is the first one with `_CALLS` calls; if there is none, the one on which most time was spent, when the program
closes its session or ends. The program ends when the table is complete.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import runpy
import sys
import time
from collections.abc import Sequence
from typing import Any, Callable

from synkhronos._utils.rendezvous import count_launched

_CALLS = 5  # the first ones may compile
_SECONDS = 20.0  # of all calls of a function, after which fewer calls are enough


#: Arguments of calls that `synkhronos.plan` does not have.
_OF_CALLS = ("num_slices", "check_against_theano", "output_subset", "batch_s")


class _Complete(BaseException):
    """The table is complete, or cannot be made. A program does not catch it."""


class _Seen:
    """Calls of one function.

    Attributes
    ----------
    n_calls : int
    seconds : float
        Of all calls but the first.
    latest : tuple
        Its positional and keyword arguments in the latest call.
    is_refused : bool
        Whether its number of rows cannot be changed, as that of an update.
    """

    def __init__(self) -> None:
        self.n_calls, self.seconds = 0, 0.0
        self.latest: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.is_refused = False


class Watch:
    """Watch the calls of a program, and measure one function.

    Parameters
    ----------
    options : dict
        Keyword arguments of `synkhronos.plan`.

    Attributes
    ----------
    result : Plan or None
    error : Exception or None
        Why the function cannot be measured.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._options = options
        self._seen: dict[Any, _Seen] = {}
        self._is_within = False  # a call, or the measurement
        self._is_installed = False

    def install(self) -> None:
        """Count calls as soon as the program uses Synkhronos, which imports the backend: it may set flags before."""
        import synkhronos

        names = vars(synkhronos)
        lazy = names["__getattr__"]

        def first_use(name: str) -> Any:
            found = lazy(name)
            if "loop" not in names:  # a module that needs no backend
                return found
            from synkhronos._api import Session

            names["__getattr__"] = lazy
            self._wrap(synkhronos, "loop", self._loop_of)
            self._wrap(Session, "__init__", self._begin)
            self._wrap(Session, "stop", self._stop)
            return names[name]

        names["__getattr__"] = first_use

    def _wrap(self, kind: Any, name: str, handle: Callable[..., Any]) -> None:
        inner = getattr(kind, name)

        @functools.wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._is_within or self.result is not None or self.error is not None:
                return inner(*args, **kwargs)
            self._is_within = True
            one, *others = args or (kwargs.pop("f", None),)
            try:
                return handle(functools.partial(inner, one), one, others, kwargs)
            finally:
                self._is_within = False

        setattr(kind, name, wrapper)

    def _begin(self, inner: Callable[..., Any], session: Any, args: Any, kwargs: Any) -> None:
        """Count calls of functions from the first session on. Now `train` can be imported."""
        import synkhronos

        if not self._is_installed:
            self._is_installed = True
            train: Any = getattr(synkhronos.extensions, "train")  # noqa: B009 - it is imported when it is used
            functions = [synkhronos.Function, *_subclasses(synkhronos.Function)]
            for kind in (*functions, train.TrainFunction, train.ExactTrainFunction):
                if "__call__" in vars(kind):
                    self._wrap(kind, "__call__", self._call)
            for kind in (train.TrainFunction, train.ExactTrainFunction, train.LocalTrainFunction):
                self._wrap(kind, "loop", self._loop)
        inner(*args, **kwargs)

    def _call(self, inner: Callable[..., Any], f: Any, args: Any, kwargs: Any) -> Any:
        start = time.perf_counter()
        result = inner(*args, **kwargs)
        seen = self._seen.setdefault(f, _Seen())
        seen.n_calls += 1
        seen.seconds += time.perf_counter() - start if seen.n_calls > 1 else 0.0
        seen.latest = args, kwargs
        is_recorded = _session_of(f).sequencer.place  # in a sequence
        if (seen.n_calls >= _CALLS or seen.seconds > _SECONDS) and not is_recorded and not seen.is_refused:
            self._measure(f, args, kwargs)
        return result

    def _loop(self, inner: Callable[..., Any], f: Any, args: Any, kwargs: Any) -> Any:
        """Measure the step of a loop."""
        given = inspect.signature(inner).bind(*args, **kwargs).arguments
        data = [given["x_data"], *([] if given.get("y_data") is None else [given["y_data"]])]
        return self._measure_loop(inner, f, data, args, {**kwargs, **given.get("options", {})}, kwargs)

    def _loop_of(self, inner: Callable[..., Any], f: Any, args: Any, kwargs: Any) -> Any:
        """Measure the function of `synkhronos.loop`."""
        inputs = args[0] if args else kwargs.get("inputs")
        return self._measure_loop(inner, f, inputs, args, kwargs, kwargs)

    def _measure_loop(self, inner: Callable[..., Any], f: Any, data: Any, args: Any, options: Any, kwargs: Any) -> Any:
        from synkhronos._api import inputs_of_loop

        is_of_arrays = isinstance(data, (list, tuple)) and data and not callable(data[0])
        is_known = hasattr(f, "get_shared") or hasattr(f, "_structure")
        if not is_of_arrays or "batch_size" not in options or not is_known:
            self._is_within = False  # batches of a callable have no number of rows, but it may call functions
            return inner(*args, **kwargs)
        named = {"batch": options["batch_size"] * _session_of(f).n_ranks}
        for key, value in (options.get("schedule") or {}).items():
            named[getattr(key, "name", key)] = value(0) if callable(value) else value
        if options.get("rule") is not None:
            self._options.setdefault("rule", "delayed:auto" if options["rule"] == "local" else options["rule"])
        params = options.get("params") or getattr(f, "_params", ())
        if params:
            named["params"] = params
        f, inputs = _function_of_loop(f, data)
        return self._measure(f, tuple(inputs_of_loop(f, inputs, params)), named, is_shuffled=True)

    def _stop(self, inner: Callable[..., Any], session: Any, args: Any, kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        is_end = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        try:
            if not session.broken and is_end:
                self.finish()
        finally:
            self._seen.clear()
            inner(*args, **kwargs)

    def finish(self) -> None:
        """Measure the function with the most time of those that can be measured, if the session is not closed."""
        for f, seen in sorted(self._seen.items(), key=lambda item: (-item[1].seconds, -item[1].n_calls)):
            if not seen.is_refused and self.result is None and self.error is None:
                self._measure(f, *seen.latest)

    def _measure(self, f: Any, args: Any, kwargs: Any, is_shuffled: bool = False) -> None:
        import numpy as np

        import synkhronos

        kwargs = dict(kwargs)
        dropped = [name for name in _OF_CALLS if kwargs.pop(name, None) is not None]
        args = (*args, *(kwargs.pop(name) for name in ("x_data", "y_data") if name in kwargs))
        batch, options = kwargs.pop("batch", None), dict(self._options)
        self._is_within = True
        options["shuffled"] = is_shuffled or (batch is not None and np.ndim(batch) == 1)
        try:
            if batch is not None and "batch" not in options:
                options["batch"] = _length(batch, f, args, kwargs)
            self.result = synkhronos.plan(f, *args, **options, **kwargs)
        except (ValueError, TypeError, ImportError, OSError, synkhronos.SynkhronosError) as error:
            if "no scattered inputs and no sliceable" in str(error):
                self._seen.setdefault(f, _Seen()).is_refused = True  # it has no rows
                self._is_within = False
                return
            self.error = error
        else:
            if dropped:
                self.result.notes.append(f"Measured without {', '.join(dropped)}, which calls of the program have")
        raise _Complete


def _subclasses(kind: type) -> list[type]:
    found: list[type] = kind.__subclasses__()
    return [*found, *(one for sub in found for one in _subclasses(sub))]


def _session_of(f: Any) -> Any:
    """Return the session of a function, or of a step."""
    functions = getattr(f, "_functions", None) or [getattr(f, "function", f)]
    return functions[0]._session()


def _function_of_loop(f: Any, inputs: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return the function that a loop runs, and its inputs: a `TrainFunction` has another one for its loop."""
    make = getattr(f, "_make_step", None)
    if make is None or len(inputs) != len(f._structure):
        return f, inputs
    f._step = f._step or make()
    are_lists = [isinstance(one, (list, tuple)) for one in f._structure]
    return f._step, [each for one, is_list in zip(inputs, are_lists) for each in (one if is_list else [one])]


def _length(batch: Any, f: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return the number of rows that the argument ``batch`` of a call selects."""
    import numpy as np

    from synkhronos._api import Target

    if isinstance(batch, (int, np.integer)):
        return int(batch)
    if isinstance(batch, slice):
        return len(range(*batch.indices(Target(_session_of(f), f, args, kwargs, ()).n_rows)))
    rows = np.asarray(batch)
    return int(rows.sum() if rows.dtype == bool else len(rows))


def options_of(given: Any) -> dict[str, Any]:
    """Return the keyword arguments of `synkhronos.plan` from those of the command line.

    Paths of files to write become absolute in ``given``, because the program may change the directory.

    Raises
    ------
    ValueError
        If one cannot be read, or a file cannot be written.
    ImportError
        If Matplotlib is needed, and cannot be imported.
    """
    from synkhronos._costs import link_of

    link_of(given.line)
    for name in ("machine_out", "csv", "plot"):
        if getattr(given, name) is not None:
            check_file(name.replace("_", "-"), getattr(given, name))
            setattr(given, name, os.path.abspath(getattr(given, name)))
    found: dict[str, Any] = {"line": given.line, "machine_out": given.machine_out}
    if given.machine is not None:
        from synkhronos._costs import speeds_from  # imports NumPy, which reads the environment

        found["machine"] = speeds_from(given.machine)
    for name in ("nodes", "ranks", "batch"):
        text = getattr(given, name)
        if text is not None:
            found[name] = numbers(name, text)
    if max(found.get("nodes", [1])) > 1 and given.line is None and count_launched(os.environ) == 1:
        raise ValueError(f"--nodes is {given.nodes!r} without nodes to measure; expected also a link, as --line 10Gbit")
    if given.rule is not None:
        from synkhronos._costs import rule_named

        found["rule"] = given.rule.split(",")
        for rule in found["rule"]:
            rule_named(rule)
    if given.slow is not None:
        slow = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", given.slow)
        if slow is None or not float(slow[2]):
            raise ValueError(f"--slow is {given.slow!r}; expected such as 1x5, for one rank that is five times slower")
        found["slow"] = [float(slow[2])] * int(slow[1])
    return found


def check_file(name: str, path: str) -> None:
    """Raise `ValueError` if a file cannot be written or drawn to, and `ImportError` if Matplotlib is missing."""
    existing = path if os.path.exists(path) else os.path.dirname(path) or "."
    if not path or os.path.isdir(path) or not os.access(existing, os.W_OK):
        raise ValueError(f"--{name} is {path!r}, which cannot be written; expected a file in a folder that exists")
    if name == "plot":
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError as error:
            raise ImportError(
                f"--plot is {path!r}; expected also Matplotlib (pip install matplotlib), which is not usable: {error}"
            ) from None
        suffix, kinds = os.path.splitext(path)[1][1:].lower(), FigureCanvasBase.get_supported_filetypes()
        if suffix and suffix not in kinds:
            raise ValueError(f"--plot is {path!r}; expected one of the suffixes {', '.join(sorted(kinds))}")


def numbers(name: str, text: str) -> list[int]:
    """Return numbers of a list such as ``"1,3"``, or of a range such as ``"1-64"``, in which each doubles the last.

    >>> numbers("nodes", "1-6"), numbers("nodes", "3")
    ([1, 2, 4, 6], [3])
    """
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", part)
        value, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if last < value:
            raise ValueError(f"--{name} is {text!r}; expected such as 8, 1,3 or 1-64")
        while value < last:
            found.append(value)
            value *= 2
        found.append(last)
    return found


def watch_program(program: Sequence[str], given: Any) -> Watch:
    """Prepare to execute a program.

    Parameters
    ----------
    program : sequence of str
        A script and its arguments.
    given : argparse.Namespace
        The options of the command line.

    Returns
    -------
    Watch

    Raises
    ------
    ValueError
        If an option cannot be used, or there is no such script.
    ImportError
        If Matplotlib is needed, and cannot be imported.
    """
    watch = Watch(options_of(given))
    try:
        open(program[0], "rb").close()
    except OSError as error:
        raise ValueError(f"SCRIPT is {program[0]!r}; expected a file that can be read: {error.strerror}") from None
    watch.install()
    return watch


def plan_program(watch: Watch, program: Sequence[str], given: Any) -> int:
    """Execute a program until a function was measured, and write the table to standard output; return the exit code.

    The code is 1 if there was no function to measure, or if it could not be measured, of which `Watch.error` is the
    reason.
    """
    sys.argv[:] = program
    sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
    process = os.getpid()
    try:
        try:
            runpy.run_path(os.path.abspath(program[0]), run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0) or os.getpid() != process:
                raise
        watch.finish()
    except _Complete:
        pass
    if watch.result is None:
        if watch.error is None:
            text = "calls no function of Synkhronos of which the number of rows can be changed"
            sys.stdout.write(f"{program[0]} {text}\n")
        return 1
    sys.stdout.write(f"{watch.result}\n")
    if given.csv is not None:
        with open(given.csv, "w") as file:
            file.write(watch.result.to_csv())
    if given.plot is not None:
        watch.result.plot(given.plot)
    return 0
