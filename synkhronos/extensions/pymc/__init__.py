"""PyMC: a model's log-probability and its gradient, divided by the rows of its data.

`parallel` is a context in which the functions that PyMC builds for a model are exact functions: observed values and
covariates lie on the ranks by their rows, parameters go to all ranks with each evaluation. PyMC's samplers call these
functions as they call their own, and need not know.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import synkhronos
from synkhronos import _backends
from synkhronos.extensions.pymc.building import Builder
from synkhronos.extensions.pymc.rows import ModelData

__all__ = ["parallel"]


@contextlib.contextmanager
def parallel(model: Any, rows: int | None = None) -> Iterator[Any]:
    """A context in which all ranks together evaluate a model, for `pm.sample`, `pm.find_MAP`, `pm.fit` and the like.

    Functions that PyMC builds in it, and that use the model's data, are divided by the rows of these: observed values,
    `pm.Data`, and constants of 65 numbers and more. Their values are those of PyMC's own functions, up to rounding.
    Data are sent once, and again after ``set_data``. Functions that only draw random numbers are PyMC's own, on the
    controller. The context is that of the model, too.

    Parameters
    ----------
    model : pymc.Model
    rows : int, optional
        How many rows the data have: the arrays are divided that are as long along some axis, the first of these.
        Default: the length of the observed variable with most values, along its first axis of 65 entries and more, or
        else along its longest axis. It changes speed, not results.

    Yields
    ------
    pymc.Model
        The model.

    Raises
    ------
    SessionError
        A `RuntimeError`: before ``fork``.
    TypeError
        For what is no model, and for a frozen one, whose functions are compiled before.
    ValueError
        If ``rows`` is given and no data have as many.

    Warns
    -----
    RuntimeWarning
        If the model has no data that can be divided.

    Examples
    --------
    ::

        with synkhronos.extensions.pymc.parallel(model):
            pm.sample(cores=1, chains=1)
    """
    synkhronos.distribute()  # raises where there is no session
    builder = Builder(ModelData(model, rows))
    with contextlib.ExitStack() as ending:
        ending.callback(_backends.divert(builder))
        if importlib.util.find_spec("nutpie") is not None:
            from synkhronos.extensions.pymc.nutpie import diverted

            ending.enter_context(diverted())
        yield ending.enter_context(model)
