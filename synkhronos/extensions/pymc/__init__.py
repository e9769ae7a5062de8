"""PyMC models: log-probability and gradient on all ranks, sharded by the rows of the model's data.

`parallel` is a context in which the functions that PyMC builds for a model are exact functions. Each rank holds its
rows of observed values and covariates; parameters are sent to all ranks with each evaluation. PyMC's samplers call
these functions as they call their own.
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
    """Have all ranks evaluate a model in a ``with`` block, for `pm.sample`, `pm.find_MAP`, `pm.fit` and the like.

    Functions that PyMC builds in the block, and that use the model's data, are sharded by the rows of the data:
    observed values, `pm.Data`, and constants of 65 numbers or more. Their values are those of PyMC's own functions, up
    to rounding. Data are sent to the ranks once, and again after ``set_data``. Functions that only draw random numbers
    are PyMC's own, on the controller. The block is also a context of the model.

    Parameters
    ----------
    model : pymc.Model
        Not frozen: its functions are compiled in the block.
    rows : int, optional
        The number of rows of the data: arrays with an axis of this length are sharded along the first such axis.
        Default: the length of the observed variable with most values, along its first axis of 65 entries or more, or
        else along its longest axis. It changes speed, not results.

    Yields
    ------
    pymc.Model
        The model.

    Raises
    ------
    SessionError
        Without a session.
    TypeError
        If ``model`` is not a model, or a frozen one, whose functions are compiled already.
    ValueError
        If ``rows`` is given and no array of the data has that many.

    Warns
    -----
    RuntimeWarning
        If the model has no data that can be sharded.

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
