"""The compiled functions of a session, and which of them are still to be replicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from synkhronos import _graphs
from synkhronos._interrupts import interrupt_behind
from synkhronos._rank import Replica, summarize
from synkhronos._session.ledger import Ledger

__all__ = ["Library"]


class Library:
    """Functions by key, in the master.

    Parameters
    ----------
    replica : Replica
        The master's.
    ledger : Ledger
    load : callable
        ``load(bundle, ranks)`` has ranks (``None``: all) load pickled functions.
    """

    def __init__(
        self,
        replica: Replica,
        ledger: Ledger,
        load: Callable[[_graphs.Bundle, tuple[int, ...] | None], None],
    ) -> None:
        self._replica = replica
        self._ledger = ledger
        self._load = load
        self._pending: dict[int, Any] = {}  # compiled, not yet distributed
        self._orphans: set[int] = set()  # of these, the ones that the user has dropped
        self._next = 0

    def add(self, function: Any) -> int:
        """Take in a compiled function, to be distributed; returns its key."""
        key = self._next
        self._next += 1
        self._replica.functions[key] = function
        self._pending[key] = function
        return key

    def drop(self, key: int) -> None:
        """Have every rank forget a function, with the next command; one still to be distributed, after that."""
        if key in self._pending:
            self._orphans.add(key)
        else:
            self._ledger.functions.append(key)

    def distribute(self, keys: Sequence[int] | None = None) -> None:
        """Replicate the functions that are not yet on every rank: those with the given keys, or all.

        Raises
        ------
        TypeError
            If a function cannot be pickled; the others are replicated all the same.
        """
        if not self._pending:
            return
        failed: Exception | None = None
        for key in list(self._pending) if keys is None else [*keys, *self._orphans]:
            function = self._pending.get(key)
            if function is None:
                continue
            try:
                bundle = _graphs.dump({key: function}, self._replica.variables)
            except Exception as error:
                interrupt = interrupt_behind(error)
                if interrupt is not None:
                    raise interrupt  # noqa: B904 - it is where the error comes from
                if key in self._orphans:  # nobody will call it
                    self._settled(key)
                    continue
                what = f"{_graphs.describe(function)} cannot be pickled, so not replicated"
                failed = TypeError(f"{what}: {summarize(error)}")
                failed.__cause__ = error
                continue
            try:
                self._load(bundle, None)
            except BaseException:
                self._ledger.variables.extend(bundle.new)  # some ranks may have them; the next try uses other keys
                raise
            for new, var in bundle.new.items():
                self._replica.variables.put(new, var)
            self._settled(key)
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # else it and this frame keep each other, and what the user drops, alive

    def _settled(self, key: int) -> None:
        """The function ``key`` is no longer pending: forget it, if the user has."""
        self._pending.pop(key, None)
        if key in self._orphans:
            self._orphans.discard(key)
            self._ledger.functions.append(key)

    def restore(self, ranks: tuple[int, ...]) -> None:
        """Give new workers the functions that the others have, and the master's values of all variables."""
        functions = {key: one for key, one in self._replica.functions.items() if key not in self._pending}
        self._load(_graphs.dump(functions, self._replica.variables, everything=True), ranks)
