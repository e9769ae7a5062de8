"""Update rules of gradient descent, divided so that an all-reduce fits in between.

Each rule gives ``(grad_updates, param_updates, grad_shared)``. A first function with `grad_updates`
writes each rank's raw gradients to `grad_shared`; ``all_reduce(grad_shared, weights=f.counts)``
makes of them the gradient of the whole minibatch, on every rank; a second function with
`param_updates` changes the parameters. Ranks that start from equal parameters stay equal, whatever
a rule remembers between steps. `grad_shared` is one flat vector (`sgd_nonflat`: a list).

Names, order and defaults of the arguments are Lasagne's, and so are the numbers; Lasagne itself is
not needed. In the formulas p is a parameter, g its gradient, everything is elementwise, and ``:=``
is an update, of which the later ones see the earlier ones' results. The rules (not `sgd_nonflat`)
raise ``TypeError`` for parameters of several dtypes, all raise ``ValueError`` for no parameters.
"""

# The stars: a rule is named in the ``__all__`` of its own module, and nowhere else.
from synkhronos.extensions.updates import adaptive, added, descent
from synkhronos.extensions.updates.adaptive import *  # noqa: F403
from synkhronos.extensions.updates.added import *  # noqa: F403
from synkhronos.extensions.updates.descent import *  # noqa: F403

__all__ = sorted([*descent.__all__, *adaptive.__all__, *added.__all__])
