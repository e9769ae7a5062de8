"""Types of public arguments, for type checkers and for the annotations of user programs.

Theano has no types, and PyTensor's are not needed: a `Variable` is any object with an owner and a type.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, Union

__all__ = ["Input", "Keywords", "Op", "Output", "Outputs", "Reduction", "Update", "Variable", "Variables"]

#: The ops of reductions; the prefix ``c_`` requests the CPU path.
Reduction = Literal["avg", "sum", "prod", "max", "min", "c_avg", "c_sum", "c_prod", "c_max", "c_min"]

#: The ops of a function's outputs.
Op = Union[Reduction, Literal["gather", "c_gather"], None]


class Variable(Protocol):
    """A variable of Theano or PyTensor."""

    @property
    def owner(self) -> Any:
        """The Apply node that computes it, or ``None``."""

    @property
    def type(self) -> Any:
        """Its type."""


class Wrapped(Protocol):
    """A variable with options of a function: ``In`` and ``Out`` of Theano and PyTensor."""

    @property
    def variable(self) -> Any:
        """The variable."""


#: One variable or a sequence of variables.
Variables = Union[Variable, Sequence[Variable]]

#: An input of a function.
Input = Union[Variable, Wrapped]

#: An output of a function, with or without an op.
Output = Union[Variable, Wrapped, tuple[Variable, Op]]

#: All outputs of a function.
Outputs = Union[Output, Sequence[Output], Mapping[str, Output], None]

#: An update of a function: the shared variable, its new value, and optionally the op.
Update = Union[tuple[Variable, Any], tuple[Variable, Any, Reduction]]


class Keywords(TypedDict, total=False):
    """Keyword arguments that `synkhronos.function` passes on to the backend's function."""

    mode: Any
    name: Union[str, None]
    profile: Any
    on_unused_input: Union[Literal["raise", "warn", "ignore"], None]
    no_default_updates: Any
    accept_inplace: bool
    rebuild_strict: bool
    allow_input_downcast: Union[bool, None]
    trust_input: bool
