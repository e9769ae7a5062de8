"""Update rules of gradient descent, for two functions with an all-reduce of the gradients between them.

Each rule returns ``(grad_updates, param_updates, grad_shared)``:

1. A function with the updates ``grad_updates`` writes each rank's gradients to ``grad_shared``, which is one flat
   vector (`sgd_nonflat`: a list).
2. ``synk.all_reduce(grad_shared, weights=f.counts)`` makes them the gradient of the full minibatch, on every rank.
3. A function with the updates ``param_updates`` changes the parameters.

If the parameters are equal on all ranks at the start, they stay equal, and so does the state that a rule keeps between
steps.

Names, order and defaults of the arguments, and the numbers, are those of Lasagne. Lasagne need not be installed. In the
formulas p is a parameter and g its gradient. All operations are elementwise. ``:=`` is an update, and later updates use
its result.
"""

# Star imports list each rule only once, in the ``__all__`` of its own module.
from synkhronos.extensions.updates import adaptive, descent
from synkhronos.extensions.updates.adaptive import *  # noqa: F403
from synkhronos.extensions.updates.descent import *  # noqa: F403

__all__ = sorted([*descent.__all__, *adaptive.__all__])
