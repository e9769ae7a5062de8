"""What training steps of all kinds take: inputs, singly or in lists, and hyperparameters by name."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from synkhronos._engine import Constant, SharedVariable, leaves_of

__all__ = ["check_names", "flatten", "free", "listed", "rows"]


def free(expressions: Any, inputs: Sequence[Any], givens: Any) -> list[Any]:
    """List the symbolic variables in expressions that have no value yet, each with a name of its own."""
    replaced = dict(givens or ())
    found = [var for var in leaves_of([*expressions, *replaced.values()], list(replaced)) if var.owner is None]
    known = {*inputs, *replaced}
    free = [var for var in dict.fromkeys(found) if var not in known and not isinstance(var, (SharedVariable, Constant))]
    names = [var.name for var in free]
    for name in names:
        if name is None or names.count(name) > 1 or name in ("x_data", "y_data", "batch", "num_slices"):
            raise TypeError(
                f"the loss or the rule has the symbolic variables {free} beside x and y: each needs a name, by which "
                "a value is passed at every call; no two the same, and none that is a parameter of the call"
            )
    return free


def check_names(given: dict[str, Any], names: Any) -> None:
    """Raise `TypeError` unless there is a value for each hyperparameter, and for nothing else."""
    if set(given) != set(names):
        raise TypeError(
            f"the step takes the symbolic variables {sorted(names)} of the loss and of the rule as keyword arguments; "
            f"got {sorted(given)}"
        )


def listed(one_or_more: Any) -> list[Any]:
    """List one or more variables."""
    return list(one_or_more) if isinstance(one_or_more, (list, tuple)) else [one_or_more]


def rows(batch: Any) -> Any:
    """Give the index that picks a batch: an int counts rows, everything else indexes already."""
    return slice(batch) if isinstance(batch, Integral) else batch


def flatten(pair: Any, structure: Any) -> list[Any]:
    """List the inputs in `pair`; where `structure` has a list, `pair` must have one as long."""
    inputs: list[Any] = []
    for item, pattern, name in zip(pair, structure, ("x_data", "y_data")):
        if not isinstance(pattern, (list, tuple)):
            inputs.append(item)
        elif isinstance(item, (list, tuple)) and len(item) == len(pattern):
            inputs.extend(item)
        else:
            raise TypeError(f"{name} must be a list of {len(pattern)}, one for each variable")
    return inputs
