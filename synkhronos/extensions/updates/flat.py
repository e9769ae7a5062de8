"""Gradients of many parameters in one flat vector, and update rules split into the two functions around its all-reduce.

The vector is a shared variable, so that one all-reduce combines the gradients of a full network. The update rules
compute on the vector, because one fused loop is faster than a loop for each parameter: Adam on 1.3 million weights in
six arrays takes 1.3 ms instead of 4.5 ms. Only the last operation, the subtraction from the parameter, needs shapes.

`divide` splits any rule. If a rule was not written for this package, it is applied to stand-in variables instead of
the gradients. In the resulting updates, the stand-ins are replaced by the variables that hold the reduced gradients. A
rule takes a list of gradients, or a loss that it differentiates. For the latter, the stand-in loss is the sum of the
products of stand-ins and parameters, so that its gradients are the stand-ins.
"""

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Union

import numpy as np

from synkhronos._backends import (
    TITLE,
    SharedVariable,
    T,
    Variable,
    clone,
    ops,
    reshaped_like,
    scalar,
    shared,
    shared_like,
)
from synkhronos._backends import grad as differentiate
from synkhronos._utils.interrupts import let_interrupts_pass

Updates = dict[Any, Any]
Divided = tuple[Updates, Updates, Any]


def shared_list(params: Any) -> list[Any]:
    """Return the parameters as a list.

    Raises
    ------
    TypeError
        If a parameter is not a shared variable.
    ValueError
        If there are no parameters.
    """
    params = list(params)
    if not params:
        raise ValueError("params is empty; expected at least one shared variable")
    for param in params:
        if not isinstance(param, SharedVariable):
            raise TypeError(f"params has {param!r}; expected {TITLE} shared variables")
    return params


def gradients(loss_or_grads: Any, params: Sequence[Any]) -> list[Any]:
    """Differentiate a scalar loss with respect to each parameter; return a list of gradients unchanged.

    Raises
    ------
    ValueError
        If the number of gradients differs from the number of parameters.
    """
    if not isinstance(loss_or_grads, (list, tuple)):
        return differentiate(loss_or_grads, list(params))
    if len(loss_or_grads) != len(params):
        raise ValueError(
            f"got {len(loss_or_grads)} gradients for {len(params)} parameters; expected one for each, in the same order"
        )
    return list(loss_or_grads)


def number(value: Any, dtype: str) -> Any:
    """Convert a hyperparameter (a number or a symbolic scalar) to a dtype."""
    if isinstance(value, Variable):
        return value if value.dtype == dtype else T.cast(value, dtype)
    return np.asarray(value, dtype=dtype)


def zeros_like(param: Any, name: str) -> Any:
    """Create a shared variable of zeros with a parameter's shape, dtype and broadcast pattern."""
    value = param.get_value(borrow=True)
    zeros = np.zeros(value.shape, value.dtype)
    return shared_like(zeros, name, param)


class FlatGradient:
    """Gradients of parameters in one shared vector, one after the other in C order.

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter.
    params : iterable of shared variables
        All of one floating-point dtype. The vector has their present shapes; these must not change later.

    Attributes
    ----------
    vector : shared variable, shape ``(n,)``
        Zeros until the gradient function has run; n is the number of elements of all parameters.
    updates : OrderedDict
        The updates that write the gradients to `vector`.

    Raises
    ------
    TypeError
        If the parameters differ in dtype, a gradient's dtype differs from its parameter's, or a parameter is not a
        shared variable.
    ValueError
        If ``params`` is empty, or the number of gradients differs from the number of parameters.
    """

    def __init__(self, loss_or_grads: Any, params: Any) -> None:
        self.params = shared_list(params)
        self.dtype = self.params[0].dtype
        if any(param.dtype != self.dtype for param in self.params):
            raise TypeError(
                "the parameters have several dtypes: {}; expected one dtype, for one flat gradient. Cast the "
                "parameters, or use sgd_nonflat, which keeps a gradient for each parameter".format(
                    ", ".join(f"{param} is {param.dtype}" for param in self.params)
                )
            )
        grads = gradients(loss_or_grads, self.params)
        for param, grad in zip(self.params, grads):
            if grad.dtype != self.dtype:
                raise TypeError(
                    f"the gradient of {param} is {grad.dtype}; expected {self.dtype}, the dtype of the parameter. "
                    "Cast the gradient"
                )
        self.shapes = [param.get_value(borrow=True).shape for param in self.params]
        self.vector = self.zeros("grad_shared")
        flat = T.concatenate([grad.reshape((-1,)) for grad in grads])
        self.updates = OrderedDict([(self.vector, flat)])

    def zeros(self, name: str) -> Any:
        """Create a shared vector of zeros with the gradient's length and dtype, for the state of a rule."""
        size = sum(int(np.prod(shape)) for shape in self.shapes)
        return shared(np.zeros(size, self.dtype), name=name)

    def numbers(self, *values: Any) -> list[Any]:
        """Convert each hyperparameter to the gradient's dtype."""
        return [number(value, self.dtype) for value in values]

    def pieces(self, vector: Any) -> Iterator[Any]:
        """Split a vector of the gradient's length into views with the parameters' shapes."""
        start = 0
        for param, shape in zip(self.params, self.shapes):
            stop = start + int(np.prod(shape))
            yield reshaped_like(vector[start:stop], shape, param)
            start = stop

    def divided(self, state: Any, step: Any) -> Divided:
        """Return a rule's result: updates of its state, and a vector of steps to subtract from the parameters."""
        updates = OrderedDict(state)
        updates.update((param, param - piece) for param, piece in zip(self.params, self.pieces(step)))
        return self.updates, updates, self.vector


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
    if isinstance(rule, (dict, list, tuple)):
        raise TypeError(
            f"update_rule is updates, as a {type(rule).__name__}; expected the rule itself, and its arguments after it"
        )
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
