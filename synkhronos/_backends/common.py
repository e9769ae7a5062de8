"""What both backends share: a rule for products, loops, the index of compiled modules, and placeholders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["FOR_EXACT", "FOR_SLICES", "Absent", "Loop", "find_new_modules", "only_scaled", "read_loop", "skip"]

#: Tags of rewrites for exact functions, and for their functions of slices; `synkhronos._theano_compat.one_pass` has
#: them, too.
FOR_EXACT, FOR_SLICES = "synkhronos_exact", "synkhronos_slices"


def only_scaled(node: Any, product: Any, users_of: Callable[[Any], Sequence[Any]]) -> bool:
    """Return whether an Apply node multiplies matrix products that nothing else uses.

    The backends' own rewrite multiplies any product within BLAS. The product is then computed again for each other use.
    With Adam and RMSprop, the gradient of a weight has two.

    Parameters
    ----------
    node : Apply
    product : Op
        The operation of a matrix product.
    users_of : callable
        Returns the users of a variable.
    """
    found = [one for one in node.inputs if one.owner is not None and one.owner.op == product]
    return bool(found) and all(len(users_of(one)) == 1 for one in found)


class Loop(NamedTuple):
    """Description of a Scan: the graph of one step, and the inputs of the Scan in the outer graph.

    The inputs of a Scan are the number of steps, sequences, states, shared variables, lengths of results, and others.
    Its outputs are states, results and shared variables. Pairs are (variable in the step, variable in the outer graph).
    """

    inputs: list[Any]  # of one step
    outputs: list[Any]  # of one step: new entries of states, results, new values of shared variables, any condition
    n_steps: Any
    sequences: list[tuple[Any, Any]]
    states: list[tuple[list[Any], Any]]  # (entries of the state that a step reads, initial state in the outer graph)
    n_new: list[int]  # number of new entries of each state in a step
    shared: list[tuple[Any, Any]]
    lengths: list[Any]  # lengths of the results
    others: list[tuple[Any, Any]]
    is_while: bool
    like: Callable[[Sequence[Any], Sequence[Any]], Any]  # makes a Scan Op of the same structure from another step graph

    def new_states(self, outputs: Sequence[Any]) -> list[list[Any]]:
        """Select the new entries of each state from the outputs of a step."""
        rest = list(outputs)
        return [[rest.pop(0) for _ in range(n)] for n in self.n_new]

    def results(self, outputs: Sequence[Any]) -> list[Any]:
        """Select the results from the outputs of a step."""
        return list(outputs)[sum(self.n_new) :][: len(self.lengths)]


def read_loop(
    node: Any, inputs: list[Any], outputs: list[Any], settings: Any, shared: Iterable[tuple[Any, Any]], like: Any
) -> Loop:
    """Return the description of a Scan.

    Parameters
    ----------
    node : Apply
        The Scan.
    inputs, outputs : list of variables
        Inputs and outputs of a step.
    settings : object
        Object with the Scan's numbers of states of each kind, and their taps, as attributes.
    shared, like
        See `Loop`.
    """
    op, outer = node.op, node.inputs
    entries = [*op.inner_mitmot(inputs), *op.inner_mitsot(inputs), *op.inner_sitsot(inputs)]
    states = [*op.outer_mitmot(outer), *op.outer_mitsot(outer), *op.outer_sitsot(outer)]
    return Loop(
        inputs=list(inputs),
        outputs=list(outputs),
        n_steps=outer[0],
        sequences=list(zip(op.inner_seqs(inputs), op.outer_seqs(outer))),
        states=[([entries.pop(0) for _ in taps], state) for taps, state in zip(settings.tap_array, states)],
        n_new=[*map(len, settings.mit_mot_out_slices), *[1] * (settings.n_mit_sot + settings.n_sit_sot)],
        shared=list(shared),
        lengths=list(op.outer_nitsot(outer)),
        others=list(zip(op.inner_non_seqs(inputs), op.outer_non_seqs(outer))),
        is_while=settings.as_while,
        like=like,
    )


class Absent:
    """Stand-in for the class of an operation that a backend does not have, so that one table of rules serves all.

    It has no instances.
    """


def skip(*_: Any) -> None:
    """Do nothing. Stand-in for a function that a backend does not need."""


_seen: dict[str, int] = {}  # by folder of compiled modules: its time of modification when it was read last


class _Unlisted(dict[str, Any]):
    """An index of modules that lists none. `ModuleCache.refresh` opens the file of each module that it lists."""

    def items(self) -> Any:
        return {}.items()


def find_new_modules(cache: Any) -> None:
    """Add modules that other processes have compiled to the index of the backend's `ModuleCache`.

    Unlike ``cache.refresh()``, this does not open the file of each known module; there may be thousands. Modules that
    were removed from the folder are removed from the index, too.
    """
    modified, folders = 0, set()
    with contextlib.suppress(FileNotFoundError):
        modified = os.stat(cache.dirname).st_mtime_ns
        if _seen.get(cache.dirname) == modified:
            return
        folders = set(os.listdir(cache.dirname))
    known = cache.module_hash_to_key_data
    if all(_folder_of(data.get_entry()) in folders for data in known.values()):
        cache.module_hash_to_key_data = found = _Unlisted(known)
        try:
            cache.refresh(cleanup=False)
        finally:
            known.update(found)
            cache.module_hash_to_key_data = known
    else:
        cache.refresh(cleanup=False)
    _seen[cache.dirname] = modified


def _folder_of(module: str) -> str:
    return os.path.basename(os.path.dirname(module))
