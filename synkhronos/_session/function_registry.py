"""Registry of a session's compiled functions: which exist, and which are not on every rank yet."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Sequence
from typing import Any, Callable

from synkhronos import _graph
from synkhronos._backends import precompile
from synkhronos._memory import release_freed_memory
from synkhronos._rank import Replica, summarize
from synkhronos._session.ledger import Ledger
from synkhronos._session.replicas import StaleReplicas
from synkhronos._utils.display import progress
from synkhronos._utils.interrupts import FinalizerQueue, deferred_interrupts, let_interrupts_pass
from synkhronos.errors import WorkerError

_LARGE = 1 << 24  # bytes

_logger = logging.getLogger("synkhronos")


class FunctionRegistry:
    """Registry of functions by key, in the controller.

    Parameters
    ----------
    replica : Replica
        The controller's replica.
    ledger : Ledger
    load : callable
        ``load(bundle, ranks)`` has the given ranks (``None``: all) load pickled functions.
    definitions : Definitions
        The program's definitions (classes, globals) that the ranks already have.
    replicas : StaleReplicas
    """

    def __init__(
        self,
        replica: Replica,
        ledger: Ledger,
        load: Callable[[_graph.Bundle, tuple[int, ...] | None], None],
        definitions: _graph.Definitions,
        replicas: StaleReplicas,
    ) -> None:
        self._replica, self._replicas = replica, replicas
        self._ledger = ledger
        self._load = load
        self._pending: dict[int, tuple[Any, Sequence[Any]]] = {}  # compiled and not yet distributed, with `also`
        self._failed: set[int] = set()  # keys of pending functions whose distribution failed
        self._definitions = definitions
        self._ended: FinalizerQueue[int] = FinalizerQueue()
        self._distributing = False
        self._next = 0

    def add(self, function: Any, owner: Any, also: Sequence[Any]) -> int:
        """Register a compiled function for distribution; return its key.

        All ranks drop the function after ``owner`` is garbage-collected. They also get the shared variables ``also``.
        """
        key = self._next
        self._next += 1
        self._ended.watch(owner, key)
        self._replica.functions[key] = function
        self._pending[key] = function, also
        return key

    def forget_ended(self) -> None:
        """Have every rank drop, with the next command, the functions whose owners are garbage-collected."""
        if self._distributing or not self._ended.waiting:  # never send a function after the entry that drops it
            return
        for key in self._ended.take():
            self._forget_pending(key)
            self._ledger.functions.append(key)

    def distribute(self, keys: Sequence[int] | None = None, variable: Any = None) -> None:
        """Replicate functions that are not yet on every rank.

        If a function fails, the others are still replicated. A failed function is tried again when it is called, but
        not each time that others are replicated.

        Parameters
        ----------
        keys : sequence of int, optional
            The functions. Default: all that have not failed yet.
        variable : shared variable, optional
            Replicate the functions that use this variable. Failures are ignored if any of the functions brings the
            variable to the ranks.

        Raises
        ------
        TypeError
            If a function cannot be pickled.
        WorkerError
            If a rank cannot load a function.
        """
        is_explicit = keys is None and variable is None  # the program has called `distribute`
        if not self._pending and not is_explicit:
            return
        self.forget_ended()
        if variable is not None:
            keys = [
                key
                for key, (one, also) in self._pending.items()
                if _graph.uses(one, variable) or any(other.container is variable.container for other in also)
            ]
        elif keys is None:
            keys = [key for key in self._pending if key not in self._failed]
        failed: Exception | None = None
        self._distributing = True
        try:
            with progress("compiling and distributing functions", len(keys)) as work:
                for key in keys:
                    error = self._replicate(key) if key in self._pending else None
                    failed = failed or error
                    work.done += 1
        finally:
            self._distributing = False
        if failed is not None and (variable is None or self._replica.variables.key(variable) is None):
            try:
                raise failed
            finally:
                del failed  # break the reference cycle with this frame, which would keep the user's objects alive
        if is_explicit:
            self._refresh()

    def _refresh(self) -> None:
        """Send the definitions that distributed functions read and that have changed since they were sent."""
        try:
            bundle = self._dump({}, refresh=True)
        except pickle.PicklingError as error:
            raise TypeError(str(error)) from error
        if bundle.slots:
            self._send(bundle)

    def _replicate(self, key: int) -> Exception | None:
        """Replicate one function; return the error if this fails, otherwise ``None``."""
        function, also = self._pending[key]
        try:
            precompile(function)
        except RecursionError:  # caused by the depth of the program's stack, which may differ in the next call
            raise
        except Exception as error:
            let_interrupts_pass(error)
            self._failed.add(key)
            return error
        try:
            key_of = self._replica.variables.key
            bundle = self._dump({key: function}, also=[var for var in also if key_of(var) is None])
        except RecursionError:
            raise
        except Exception as error:
            let_interrupts_pass(error)
            self._failed.add(key)
            failed = TypeError(
                f"{_graph.describe(function)} cannot be replicated, because it cannot be pickled: {summarize(error)}; "
                "its graph may only hold objects that cloudpickle can pickle"
            )
            failed.__cause__ = error
            return failed
        start = time.perf_counter()
        try:
            self._send(bundle)
        except WorkerError as error:
            self._failed.add(key)
            error.args = (f"{_graph.describe(function)} cannot be loaded: {error}",)
            return error
        _logger.debug(
            "distributed %s in %.2f s: a graph of %d bytes, and %d bytes of values; new shared variables: %s",
            _graph.describe(function),
            time.perf_counter() - start,
            len(bundle.pickled),
            sum(buffer.nbytes for buffer in bundle.buffers),
            ", ".join(map(str, bundle.new.values())) or "none",
        )
        self._forget_pending(key)
        return None

    def distribute_variables(self, variables: Sequence[Any]) -> None:
        """Replicate shared variables that no distributed function uses yet."""
        self._send(self._dump({}, also=variables))

    def _dump(self, functions: dict[int, Any], **options: Any) -> _graph.Bundle:
        self._replicas.begin_loading()
        known, place = self._replica.variables, self._replicas.place
        return _graph.dump(functions, known, definitions=self._definitions, place=place, **options)

    def _send(self, bundle: _graph.Bundle) -> None:
        self._definitions.assume_missing(bundle.slots)
        try:
            self._load(bundle, None)
        except BaseException:
            self._ledger.variables.extend(bundle.new)  # drop them where they arrived: the next attempt uses new keys
            raise
        with deferred_interrupts():  # these records must match the state of the ranks
            self._definitions.note(bundle.slots)
            for new, var in bundle.new.items():
                self._replica.variables.put(new, var)
            self._replica.move_to_heap(list(bundle.new.values()))
            self._replicas.note_loaded(bundle.new)
        if sum([getattr(_graph.get_array(var), "nbytes", 0) for var in bundle.new.values()]) >= _LARGE:
            release_freed_memory()  # where values were until now

    def _forget_pending(self, key: int) -> None:
        """Remove the function ``key`` from the pending functions."""
        self._pending.pop(key, None)
        self._failed.discard(key)

    def restore(self, ranks: tuple[int, ...]) -> None:
        """Send new workers the functions that the other ranks have, and the controller's values of all variables."""
        functions = {key: one for key, one in self._replica.functions.items() if key not in self._pending}
        # new workers on other nodes inherit no more definitions than their node leader has
        self._load(self._dump(functions, everything=True), ranks)
