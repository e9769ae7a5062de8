"""What a `Function` shows of itself: in text, in notebooks, and to `dir`."""

from __future__ import annotations

from typing import Any

from synkhronos._calls.arguments import describe_inputs
from synkhronos._utils.display import html_table, public_names

__all__ = ["Appearance"]


class Appearance:
    """The part of a `Function` that people look at."""

    name: str | None
    _graph: Any
    _results: Any
    _session: Any

    def __repr__(self) -> str:
        session = None if self._session is None else self._session()
        ranks = "no session" if session is None or session.broken else f"{session.n_ranks} ranks"
        return f"<synkhronos.Function {self.name or ''}({describe_inputs(self._graph)}) -> {self._results}; {ranks}>"

    def _repr_html_(self) -> str:
        """Inputs and outputs as a table, as notebooks show it."""
        return html_table(
            [("Function", self.name or ""), ("inputs", describe_inputs(self._graph)), ("outputs", self._results)]
        )

    def __dir__(self) -> list[str]:
        return public_names(self, "join")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self!r} belongs to its session and can be neither copied nor pickled: build it anew, by "
            "synkhronos.function, where it is wanted; the values of its shared variables can be saved by "
            "synkhronos.extensions.checkpoint"
        )
