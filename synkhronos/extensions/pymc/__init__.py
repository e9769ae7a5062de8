"""Evaluate PyMC models on all ranks, sharded by the rows of the model's data.

In a `parallel` block, the functions that PyMC builds for a model are exact functions. Each rank holds its rows of the
observed values and covariates. Each evaluation sends the parameters to all ranks. PyMC's samplers call these functions
as they call functions of PyTensor.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import synkhronos
from synkhronos import _backends
from synkhronos.extensions.pymc.building import Builder, ModelFunction, replaced
from synkhronos.extensions.pymc.rows import ModelData

__all__ = ["parallel", "report"]

_NAME = "synkhronos.extensions.pymc.parallel"
_GAIN = 1.1  # ratio of times from which on `report` speaks of a gain
_PAIRS = 25  # of calls that `report` times


@contextlib.contextmanager
def parallel(model: Any, rows: int | None = None) -> Iterator[Any]:
    """Have all ranks evaluate a model in a ``with`` block, for `pm.sample`, `pm.find_MAP`, `pm.fit` and the like.

    If PyMC builds a function in the block that uses the model's data, the function is sharded by the rows of the data:
    observed values, `pm.Data`, and constants of 65 numbers or more. Its results equal those of PyMC's own functions, up
    to rounding. Data are sent to the ranks once, and again after ``set_data``. Functions that only draw random numbers
    are PyMC's own, and run on the controller. The block is also a context of the model, like ``with model:``.

    With PyMC's own samplers, all ranks evaluate the model for one chain at a time, so chains follow each other,
    whatever ``cores`` is. With nutpie, the points of all chains are evaluated at once. The default number of chains is
    PyMC's.

    Parameters
    ----------
    model : pymc.Model
        Must not be frozen, because its functions are compiled in the block.
    rows : int, optional
        The number of rows of the data. Arrays with an axis of this length are sharded along the first such axis.
        Default: the length that most observed values have, along the first axis of 65 entries or more of their
        variable, or else along its longest axis. Arrays with missing values count with these. This
        affects speed, not results.

    Yields
    ------
    pymc.Model
        The model.

    Raises
    ------
    SessionError
        If there is no session.
    TypeError
        If ``model`` is not a model, or is frozen, so that its functions are compiled already.
    ValueError
        If ``rows`` is given and no array of the data has this many rows.

    Warns
    -----
    RuntimeWarning
        If the model, or a function, has no data that can be sharded. If the data have different lengths since
        ``set_data``. If the controller alone evaluates the model faster than all ranks, after some evaluations.

    Examples
    --------
    ::

        with synkhronos.extensions.pymc.parallel(model):
            pm.sample()
    """
    if importlib.util.find_spec("pymc") is None:
        raise ImportError(f"{_NAME} needs PyMC: pip install 'synkhronos[pymc]' (Python 3.12 or later)")
    try:
        synkhronos.distribute()
    except synkhronos.SessionError as error:
        if "there is no session" not in str(error):
            raise
        remedy = "call synkhronos.fork() first, or write `with synkhronos.session(), parallel(model):`"
        raise synkhronos.SessionError(f"{_NAME}: there is no session; {remedy}") from None
    builder = Builder(ModelData(model, rows))
    with contextlib.ExitStack() as ending:
        ending.callback(_backends.divert(builder))
        ending.enter_context(_chains_in_turn())
        if _nutpie_works():
            from synkhronos.extensions.pymc.nutpie import diverted

            ending.enter_context(diverted(builder))
        yield ending.enter_context(model)


def report(model: Any, rows: int | None = None) -> None:
    """Print how the ranks divide the log-probability and gradient of a model, and the time of an evaluation.

    The table names the collectives, with the lines of the program that built their variables. The evaluation, at the
    model's initial point, is compared with PyMC's own function in this process. Each of both is compiled.

    Parameters
    ----------
    model, rows
        As for `parallel`.

    Raises
    ------
    SessionError, TypeError, ValueError
        As `parallel`.

    Warns
    -----
    RuntimeWarning
        If the model has no data that can be sharded; then nothing is printed.

    Examples
    --------
    ::

        synkhronos.extensions.pymc.report(model)
    """
    from pymc.blocking import DictToArrayBijection

    with parallel(model, rows):
        made = model.logp_dlogp_function(ravel_inputs=True)
    function = made._pytensor_function
    if not isinstance(function, ModelFunction):
        return
    start = model.initial_point()
    point = DictToArrayBijection.map({one.name: start[one.name] for one in model.continuous_value_vars}).data
    calls: list[Callable[[Any], Any]] = [function, function.as_theano]
    times: list[list[float]] = [[], []]
    for _ in range(_PAIRS):
        for one, seconds in zip(calls, times):
            start = time.perf_counter()
            one(point)
            seconds.append(time.perf_counter() - start)
    ours, theirs = (1000 * statistics.median(seconds[2:]) for seconds in times)
    n_rows, n_ranks = function.data[0].n_rows, function.data[0].n_ranks
    print(f"log-probability and gradient of {point.size} parameters; {n_rows:,} rows on {n_ranks} ranks")
    print(function.partition)
    ratio = theirs / ours
    verdict = f"the ranks are {ratio:.2g} times as fast" if ratio > _GAIN else "this model does not gain"
    print(f"one evaluation: {ours:.3g} ms, {theirs:.3g} ms by PyMC alone in this process: {verdict}")


def _nutpie_works() -> bool:
    """Return whether nutpie can be imported. If not, `pm.sample` uses PyMC's own NUTS."""
    try:
        import nutpie  # noqa: F401
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def _chains_in_turn() -> Iterator[None]:
    """Have PyMC's samplers sample one chain after the other in a ``with`` block, in this process, until Ctrl-C.

    Samplers of other packages, such as nutpie, get the number of cores that the program requests.
    """
    from pymc.sampling import mcmc
    from pymc.smc import sampling

    plain, plain_draws, plain_others = mcmc.setup_cores_blas_cores, mcmc._iter_sample, mcmc._sample_external_nuts
    interrupted: set[int] = set()  # threads
    n_cores: dict[int, int] = {}  # requested in a thread

    def setup(blas_cores: Any, chains: int, cores: int, *others: Any, **named: Any) -> tuple[Any, int, Any]:
        n_cores[threading.get_ident()] = min(chains, cores)
        _, _, n_threads = plain(blas_cores, chains, cores, *others, **named)
        return contextlib.nullcontext, 1, n_threads  # the ranks limit the threads of BLAS themselves

    def sample_by_others(*args: Any, **named: Any) -> Any:
        return plain_others(*args, **{**named, "cores": n_cores[threading.get_ident()]})

    def draws(*, chain: int = 0, **named: Any) -> Iterator[Any]:
        """Draw, and end all chains at Ctrl-C; PyMC ends the current one alone, if chains follow each other."""
        thread = threading.get_ident()
        if chain == 0:
            interrupted.discard(thread)
        elif thread in interrupted:
            raise KeyboardInterrupt
        try:
            yield from plain_draws(chain=chain, **named)
        except (KeyboardInterrupt, GeneratorExit):  # the latter, if it came between two draws
            interrupted.add(thread)
            raise

    with contextlib.ExitStack() as ending:
        ending.enter_context(replaced(mcmc, "_iter_sample", draws))
        ending.enter_context(replaced(mcmc, "_sample_external_nuts", sample_by_others))
        for module in (mcmc, sampling):
            ending.enter_context(replaced(module, "setup_cores_blas_cores", setup))
        yield
