"""What type checkers know of arguments, for programs that annotate their own names, too.

Theano has no types, and PyTensor's are not needed: a variable is what has an owner and a type.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypedDict, Union

__all__ = ["Input", "Keywords", "Op", "Output", "Outputs", "Reduction", "Update", "Variable", "Variables"]

#: The ops of collectives; ``"c_avg"`` and its like ask for the CPU path.
Reduction = Literal["avg", "sum", "prod", "max", "min", "c_avg", "c_sum", "c_prod", "c_max", "c_min"]

#: The ops of a function's outputs.
Op = Union[Reduction, Literal["gather", "c_gather"], None]


class Variable(Protocol):
    """A variable of Theano or PyTensor."""

    @property
    def owner(self) -> Any:
        """The node that computes it, or ``None``."""

    @property
    def type(self) -> Any:
        """Its type."""


class Wrapped(Protocol):
    """A variable with what else a function is told of it: ``In`` and ``Out`` of Theano and PyTensor."""

    @property
    def variable(self) -> Any:
        """That variable."""


#: One variable, or several.
Variables = Union[Variable, Sequence[Variable]]

#: An input of a function.
Input = Union[Variable, Wrapped]

#: An output of a function, with its op or without.
Output = Union[Variable, Wrapped, tuple[Variable, Op]]

#: All outputs of a function.
Outputs = Union[Output, Sequence[Output], None]

#: An update of a function: the shared variable, what it becomes, perhaps the op.
Update = Union[tuple[Variable, Any], tuple[Variable, Any, Reduction]]


class Keywords(TypedDict, total=False):
    """What `synkhronos.function` passes on to the engine's own function."""

    mode: Any
    name: Union[str, None]
    profile: Any
    on_unused_input: Union[Literal["raise", "warn", "ignore"], None]
    no_default_updates: Any
    accept_inplace: bool
    rebuild_strict: bool
    allow_input_downcast: Union[bool, None]
    trust_input: bool
