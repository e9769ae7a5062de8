"""Results of figures, stored as JSON: rows of the table with their verdicts, and the measurements."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.samples import Estimate, Sample

LINE = 200  # characters; shorter parts of the file of all results are written on one line


@dataclass(frozen=True)
class Row:
    """Row of the table.

    Parameters
    ----------
    key : str
        Key in `remarks.json`.
    what : str
        Description of the comparison.
    unit : str
        Unit of the numbers.
    limit : float, optional
        Target. A row without one is for information.
    at_least : bool
        Whether the target is a lower limit.
    value, low, high : float, optional
        Measured value, and its quartiles over the rounds.
    gap : str, optional
        Reason why nothing was measured.
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
        """``"reached"``, ``"missed"``, ``"gap"``, or ``""`` without a target."""
        if self.value is None:
            return "gap"
        if self.limit is None:
            return ""
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "reached" if met else "missed"


@dataclass
class Result:
    """Results of one figure.

    Attributes
    ----------
    name, title : str
        Name and heading of the figure.
    method : str
        Description of the measurement.
    rows : list of Row
        Rows of the table.
    groups : dict of dict
        Measurements by group, which is one panel of the picture. A group has a unit, contestants and bounds (for each
        the median, the two quartiles and the number of measurements), and the reasons of gaps.
    tables : dict of dict
        Additional tables by title, each with columns and rows.
    kernels : dict of list
        Names of the contestants that multiply matrices with each BLAS library.
    parameters : dict
        Parameters of the run that the picture shows.
    environment : dict
        Description of the machine.
    failure : str
        Reason why the figure could not be measured, or an empty string.
    facts, samples : dict
        Facts that contestants report about themselves, and all numbers of each round. Only `save_raw` writes them.
    """

    name: str
    title: str
    method: str = ""
    rows: list[Row] = field(default_factory=list)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    kernels: dict[str, list[str]] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    facts: dict[str, Any] = field(default_factory=dict, compare=False)
    samples: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)

    @property
    def processor(self) -> str:
        """The kind of processor."""
        return str(self.environment.get("processor", "Some processor"))

    def record(
        self,
        group: str,
        unit: str,
        samples: dict[str, Sample],
        gaps: dict[str, str] | None = None,
        bounds: dict[str, Sample] | None = None,
    ) -> None:
        """Store the measurements of a group in `unit`, the reasons why contestants could not take part, and bounds."""
        panel = self.groups.setdefault(group, {"unit": unit, "contestants": {}, "bounds": {}, "gaps": {}})
        panel["gaps"].update(gaps or {})
        for kind, measured in (("contestants", samples), ("bounds", bounds or {})):
            for name, sample in measured.items():
                panel[kind][name] = [sample.median, *sample.quartiles, sum(map(len, sample.rounds))]
                self.samples.setdefault(group, {})[name] = sample.rounds

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
            Attributes of the `Row`.
        found : Estimate or str
            Measured value, or the reason why there is none.
        at_least, at_most : float, optional
            Target: at most one of them.
        """
        limit = at_most if at_least is None else at_least
        row = Row(f"{self.name}/{key}", what, unit, limit, at_most is None)
        if isinstance(found, str):
            self.rows.append(replace(row, gap=found))
        else:
            self.rows.append(replace(row, value=found.value, low=found.low, high=found.high))

    def save(self, path: Path) -> None:
        """Write this result, without its raw data, to the file of all results.

        It replaces an earlier result of the same figure on the same kind of processor.
        """
        others = [one for one in load(path) if (one.processor, one.name) != (self.processor, self.name)]
        results = sorted([*others, self], key=lambda one: (one.processor, one.name))
        content = [_without_empty({**asdict(one), "facts": {}, "samples": {}}) for one in results]
        path.write_text(_layout(content, 3) + "\n")

    def save_raw(self, folder: Path) -> None:
        """Write this result with its raw data to ``NAME.json`` in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self), ensure_ascii=False, default=str) + "\n")


def load(path: Path) -> list[Result]:
    """Read the file of all results; return an empty list if it does not exist."""
    results = [Result(**content) for content in json.loads(path.read_text())] if path.exists() else []
    for result in results:
        result.rows = [Row(**row) for row in result.rows]  # type: ignore[arg-type]
        for panel in result.groups.values():
            panel.update({kind: panel.get(kind, {}) for kind in ("contestants", "bounds", "gaps")})
    return results


def _without_empty(value: Any) -> Any:
    """Return the value without its empty parts."""
    if isinstance(value, dict):
        return {key: _without_empty(one) for key, one in value.items() if one not in (None, "", {}, [])}
    return [_without_empty(one) for one in value] if isinstance(value, list) else value


def _layout(value: Any, levels: int, indent: str = "") -> str:
    """Format as JSON; in the outer `levels`, each item of a long nested container has its own line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    items = list(value.values()) if isinstance(value, dict) else value
    nested = isinstance(items, list) and any(isinstance(item, (dict, list)) for item in items)
    if not nested or not levels or len(text) <= LINE:
        return text
    inner = f"{indent} "
    parts = [_layout(item, levels - 1, inner) for item in items]
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {part}" for key, part in zip(value, parts)]
    return f"{text[0]}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{text[-1]}"


def number(value: float) -> str:
    """Format a number with about three digits."""
    if value == 0 or 0.01 <= abs(value) < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if 10 <= abs(value) < 100 else f"{value:,.3g}" if abs(value) < 1 else f"{value:,.0f}"
