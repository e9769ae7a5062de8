"""Split any update rule into two parts, for an all-reduce of the gradients between them.

If a rule was not written for this package, it is applied to stand-in variables instead of the gradients. In the
resulting updates, the stand-ins are replaced by the variables that hold the reduced gradients. A rule takes a list of
gradients, or a loss that it differentiates. For the latter, the stand-in loss is the sum of the products of stand-ins
and parameters, so that its gradients are the stand-ins.
"""

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Callable, Union

import numpy as np

from synkhronos._backends import SharedVariable, T, Variable, clone, ops, scalar
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos.extensions.updates.flat import Divided, FlatGradient, gradients, shared_list, zeros_like


def divide(rule: Union[str, Callable[..., Any]], loss: Any, params: Any, *args: Any, **kwargs: Any) -> Divided:
    """Apply an update rule, and split its updates into those of the gradients and those of the parameters.

    Parameters
    ----------
    rule : str or callable
        The name of a rule of `synkhronos.extensions.updates`, or a callable that takes
        ``(loss or gradients, params, *args, **kwargs)``. It returns updates as a dict, or as pairs of shared variable
        and expression, like Lasagne's rules and most others. Or it returns the same three values as the rules of
        `synkhronos.extensions.updates`. It may use a loss only to differentiate it.
    loss : scalar expression, or list of gradients
    params : iterable of shared variables
    *args, **kwargs
        Further arguments of the rule.

    Returns
    -------
    grad_updates, param_updates : OrderedDict
    grad_shared : shared variable, or list of them
        One vector; or one variable for each parameter, if these differ in dtype and the rule returned plain updates.

    Raises
    ------
    TypeError
        If the rule returns anything else, does not take these arguments, or uses the value of the loss.
    ValueError
        If there is no rule of this name.
    """
    rule = _found(rule)
    _check_arguments(rule, loss, params, args, kwargs)
    params = shared_list(params)
    stand_ins = [param.type() for param in params]
    # add NaN: if a rule uses the value, and the check below misses that, the results show it
    stand_in_loss = sum((param * grad).sum() for param, grad in zip(params, stand_ins)) + np.nan
    try:
        result = rule(stand_in_loss, params, *args, **kwargs)
    except Exception as error:
        let_interrupts_pass(error)
        try:
            result = rule(stand_ins, params, *args, **kwargs)
        except Exception as another:
            let_interrupts_pass(another)
            result = None
        if result is None:
            raise
    if _is_divided(result):
        return rule(loss, params, *args, **kwargs)
    try:
        updates = OrderedDict(result)
    except (TypeError, ValueError):
        updates = OrderedDict()
    if not updates or not all(isinstance(var, SharedVariable) for var in updates):
        raise TypeError(
            f"the update rule {getattr(rule, '__name__', rule)} returned {result!r}; expected updates, as a dict or as "
            "pairs of shared variable and expression, or (grad_updates, param_updates, grad_shared)"
        )
    expressions = [new if isinstance(new, Variable) else T.as_tensor_variable(new) for new in updates.values()]
    if _uses_value(expressions, stand_in_loss):
        raise TypeError(
            f"the update rule {getattr(rule, '__name__', rule)} uses the value of the loss, which no rank knows during "
            "the update; expected a rule of the gradients alone. Build the step with exact=True"
        )
    if len({param.dtype for param in params}) == 1:
        flat = FlatGradient(loss, params)
        grad_updates, grad_shared, pieces = flat.updates, flat.vector, list(flat.pieces(flat.vector))
    else:
        grad_shared = pieces = [zeros_like(param, "grad_shared") for param in params]
        grads = [T.cast(grad, param.dtype) for param, grad in zip(params, gradients(loss, params))]
        grad_updates = OrderedDict(zip(grad_shared, grads))
    replaced = clone(expressions, replace=dict(zip(stand_ins, pieces)))
    return grad_updates, OrderedDict(zip(updates, replaced)), grad_shared


def _is_divided(result: Any) -> bool:
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        return False
    pairs = [item for item in result if isinstance(item, (tuple, list)) and len(item) == 2]
    return len(pairs) < 3 or not all(isinstance(var, SharedVariable) for var, _ in pairs)


def _uses_value(expressions: Sequence[Any], loss: Any) -> bool:
    """Return whether expressions use the value of a loss. Its shape may be used, because gradients start with ones."""
    seen, waiting = set(), list(expressions)
    while waiting:
        var = waiting.pop()
        if var is loss:
            return True
        node = var.owner
        if node is None or node in seen:
            continue
        seen.add(node)
        if not isinstance(node.op, (ops.Shape, ops.Shape_i)):
            uses_shape = isinstance(getattr(node.op, "scalar_op", None), scalar.Second)  # of its first input
            waiting += node.inputs[1:] if uses_shape else node.inputs
    return False


def _found(rule: Any) -> Callable[..., Any]:
    """Return the rule with the given name; if ``rule`` is a callable, return it."""
    from synkhronos.extensions import updates

    rules = [name for name in updates.__all__ if not name.startswith("apply_")]
    if isinstance(rule, str):
        if rule not in rules:
            raise ValueError(f"update_rule is {rule!r}; expected one of {', '.join(rules)}")
        rule = getattr(updates, rule)
    if not callable(rule):
        raise TypeError(f"update_rule is {rule!r}; expected a function, or one of {', '.join(rules)}")
    return rule


def _check_arguments(rule: Callable[..., Any], *given: Any) -> None:
    loss, params, args, kwargs = given
    with contextlib.suppress(ValueError):  # a callable without a signature
        signature = inspect.signature(rule)
        try:
            signature.bind(loss, params, *args, **kwargs)
        except TypeError as error:
            name = getattr(rule, "__name__", "update_rule")
            raise TypeError(f"{name}: {error}; it takes ({', '.join(signature.parameters)})") from None
