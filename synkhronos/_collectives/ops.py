"""The ops that reduce. All code that must tell one from another asks its entry in `OPS`, but for the compiled core."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, TypeVar

__all__ = ["OPS", "Op", "check_op", "lists_ops"]

_Documented = TypeVar("_Documented", bound=Callable[..., Any])


class Op(NamedTuple):
    """How values of several ranks, or slices, become one; element by element, in the order of the ranks.

    Attributes
    ----------
    on_device : str
        In C for a GPU: what becomes of an element ``a`` when ``b`` joins it (``s`` is the weight of ``b``).
    nccl : str or None
        What NCCL calls it; ``None`` if it cannot do it.
    weighted : bool
        Whether values are first multiplied by weights, which sum to one.
    widens : bool
        Whether results that are returned have NumPy's dtype for a sum, lest small integers overflow.
    """

    on_device: str
    nccl: str | None
    weighted: bool = False
    widens: bool = False


#: By name. Comparisons keep NaN, as NumPy's do.
OPS: dict[str, Op] = {
    "avg": Op("a = a + b * s", "sum", weighted=True),
    "sum": Op("a = a + b", "sum", widens=True),
    "prod": Op("a = a * b", "prod", widens=True),
    "max": Op("a = (a > b || a != a) ? a : b", "max"),
    "min": Op("a = (a < b || a != a) ? a : b", "min"),
}


def check_op(what: str, op: Any, *others: Any) -> Any:
    """The name of an op, or one of ``others``, as the user gave it for ``what``, without the prefix ``c_`` of 2017.

    Raises
    ------
    ValueError
        If there is no such op.
    """
    plain = op[2:] if isinstance(op, str) and op.startswith("c_") else op
    known = (*OPS, *others)
    if not (plain is None or isinstance(plain, str)) or plain not in known:
        raise ValueError(f"{what}: unknown op {op!r}; expected one of {', '.join(map(repr, known))}")
    return plain


def lists_ops(function: _Documented) -> _Documented:
    """Put the names of all ops in the place of ``{ops}`` in a docstring."""
    if function.__doc__:
        names = [f'``"{name}"``' for name in OPS]
        function.__doc__ = function.__doc__.replace("{ops}", f"{', '.join(names[:-1])} or {names[-1]}")
    return function
