"""Update rules of gradient descent, split into two functions with an all-reduce of the gradients in between.

Each rule returns ``(grad_updates, param_updates, grad_shared)``. A first function with ``grad_updates`` writes each
rank's gradients to ``grad_shared``. ``synk.all_reduce(grad_shared, weights=f.counts)`` makes them the gradient of the
full minibatch, on every rank. A second function with ``param_updates`` changes the parameters. Ranks that start from
equal parameters stay equal, including the state that a rule keeps between steps. ``grad_shared`` is one flat vector
(`sgd_nonflat`: a list).

Names, order and defaults of the arguments, and the numbers, are Lasagne's; Lasagne itself is not needed. In the
formulas p is a parameter and g its gradient, all operations are elementwise, and ``:=`` is an update, whose result
later updates use.
"""

# Star imports, so that each rule is listed only in the ``__all__`` of its own module.
from synkhronos.extensions.updates import adaptive, added, descent
from synkhronos.extensions.updates.adaptive import *  # noqa: F403
from synkhronos.extensions.updates.added import *  # noqa: F403
from synkhronos.extensions.updates.descent import *  # noqa: F403

__all__ = sorted([*descent.__all__, *adaptive.__all__, *added.__all__])
