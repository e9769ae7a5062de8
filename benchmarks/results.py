"""What a figure found: rows of the table with their verdicts, and what they rest on, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.samples import Estimate, Sample


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Parameters
    ----------
    key : str
        What `remarks.json` calls it.
    what : str
        What was compared.
    unit : str
        Behind each number.
    limit : float, optional
        The target; without one, the row is for information.
    at_least : bool
        Whether the target is a lower limit.
    value, low, high : float, optional
        What was reached, and its quartiles over the rounds.
    gap : str, optional
        Why nothing was measured.
    """

    key: str
    what: str
    unit: str
    limit: float | None = None
    at_least: bool = True
    value: float | None = None
    low: float | None = None
    high: float | None = None
    gap: str | None = None

    @property
    def verdict(self) -> str:
        """``"reached"``, ``"missed"``, ``"gap"``, or ``""`` where there is no target."""
        if self.value is None:
            return "gap"
        if self.limit is None:
            return ""
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "reached" if met else "missed"


@dataclass
class Result:
    """A figure's findings.

    Attributes
    ----------
    name, title : str
        The figure's module, and its heading.
    method : str
        What was done.
    rows : list of Row
    groups : dict of dict
        What was measured: for each group, which is one panel of the picture, its unit, its contestants' samples, and
        what bounds them.
    tables : dict of dict
        Further tables of numbers, by their titles: columns and rows.
    facts : dict
        What contestants said about themselves.
    environment : dict
        The machine.
    failure : str
        Why there is nothing, if there should be something.
    """

    name: str
    title: str
    method: str
    rows: list[Row] = field(default_factory=list)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def record(
        self,
        group: str,
        unit: str,
        samples: dict[str, Sample],
        gaps: dict[str, str] | None = None,
        bounds: dict[str, Sample] | None = None,
    ) -> None:
        """Note what contestants measured, in `unit`, which of them could not take part, and what bounds the others."""
        panel = self.groups.setdefault(group, {"unit": unit, "contestants": {}, "bounds": {}, "gaps": {}})
        panel["gaps"].update(gaps or {})
        for kind, measured in (("contestants", samples), ("bounds", bounds or {})):
            for name, sample in measured.items():
                low, high = sample.quartiles
                panel[kind][name] = {
                    "median": sample.median,
                    "quartiles": [low, high],
                    "numbers": sum(map(len, sample.rounds)),
                    "rounds": sample.medians,
                }

    def add(
        self,
        key: str,
        what: str,
        found: Estimate | str,
        unit: str = "×",
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Add a row.

        Parameters
        ----------
        key, what, unit : str
            As in `Row`.
        found : Estimate or str
            What was found, or why nothing was.
        at_least, at_most : float, optional
            The target: one of them, or neither.
        """
        limit = at_most if at_least is None else at_least
        row = Row(f"{self.name}/{key}", what, unit, limit, at_most is None)
        if isinstance(found, str):
            self.rows.append(replace(row, gap=found))
        else:
            self.rows.append(replace(row, value=found.value, low=found.low, high=found.high))

    def save(self, folder: Path) -> None:
        """Write ``NAME.json`` into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, default=str)
        (folder / f"{self.name}.json").write_text(text + "\n")


def load(path: Path) -> Result:
    """Read what `Result.save` wrote."""
    content = json.loads(path.read_text())
    content["rows"] = [Row(**row) for row in content["rows"]]
    return Result(**content)
