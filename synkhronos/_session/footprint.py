"""What the ranks hold of the memory in which they compute."""

from __future__ import annotations

from dataclasses import dataclass

from synkhronos._session.lifecycle import current
from synkhronos._utils.display import html_table

__all__ = ["Memory", "memory"]

_MEGABYTE = 10**6


@dataclass(frozen=True)
class Memory:
    """What each rank's region holds, in bytes; made by `memory`. ``str()`` gives a table, in megabytes.

    Attributes
    ----------
    in_use : dict
        ``in_use[rank]``: in arrays that are still needed, such as the values of shared variables.
    kept : dict
        ``kept[rank]``: in freed arrays, whose memory is kept for the next ones.
    largest : dict
        ``largest[rank]``: the most that was in use at once.
    """

    in_use: dict[int, int]
    kept: dict[int, int]
    largest: dict[int, int]

    def _lines(self) -> list[list[str]]:
        """The cells of the table, line by line."""
        rows = {"In use": self.in_use, "Kept": self.kept, "Largest": self.largest}
        lines = [["Memory (MB)", *(f"rank {rank}" for rank in self.in_use)]]
        for name, row in rows.items():
            lines.append([name, *(f"{n_bytes / _MEGABYTE:,.1f}" for n_bytes in row.values())])
        return lines

    def _repr_html_(self) -> str:
        """The table, as notebooks show it."""
        return html_table(self._lines())

    def __str__(self) -> str:
        lines = self._lines()
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def memory() -> Memory:
    """Tell what each rank holds of the memory in which it computes, now.

    No rank is asked but those that lead other machines.

    That is memory of arrays of 16 KiB and more that functions and collectives make, rounded up by a quarter at most.
    `Data`, results, and what the program itself allocates are not in it.

    Returns
    -------
    Memory
        All zeros where the kernel, or a limit of this process, allowed no such memory.

    Raises
    ------
    SessionError
        Without a session.

    Examples
    --------
    >>> with synk.session(2):
    ...     print(sorted(synk.memory().in_use))
    [0, 1]
    """
    session = current("memory")
    counts = session.tell()[1]
    return Memory(*(dict(enumerate(column)) for column in zip(*counts)))
