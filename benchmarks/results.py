"""Results of figures: rows of the table with their verdicts, and the numbers behind them, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.samples import Estimate, Sample

LINE = 200  # characters: shorter parts of the file of all results are on one line


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
        What was measured: for each group, which is one panel of the picture, its unit, its contestants and bounds
        (for each the median, the two quartiles, and how many numbers there are), and the reasons of its gaps.
    tables : dict of dict
        Further tables of numbers, by their titles: columns and rows.
    kernels : dict of list
        The names of the contestants that multiply matrices with each BLAS library.
    parameters : dict
        Parameters of the run that the picture shows.
    environment : dict
        The machine.
    failure : str
        Why there is nothing, if there should be something.
    facts, samples : dict
        The reports of contestants about themselves, and all numbers of each round: raw data, which only `save_raw`
        writes.
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
        """Note what contestants measured, in `unit`, which of them could not take part, and what bounds the others."""
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

    def save(self, path: Path) -> None:
        """Write this result, without its raw data, into the file of all results.

        It replaces an earlier result of the same figure on the same kind of processor.
        """
        others = [one for one in load(path) if (one.processor, one.name) != (self.processor, self.name)]
        results = sorted([*others, self], key=lambda one: (one.processor, one.name))
        content = [_without_empty({**asdict(one), "facts": {}, "samples": {}}) for one in results]
        path.write_text(_layout(content, 3) + "\n")

    def save_raw(self, folder: Path) -> None:
        """Write ``NAME.json`` with the raw data into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self), ensure_ascii=False, default=str) + "\n")


def load(path: Path) -> list[Result]:
    """Read the file of all results; without a file there are none."""
    results = [Result(**content) for content in json.loads(path.read_text())] if path.exists() else []
    for result in results:
        result.rows = [Row(**row) for row in result.rows]  # type: ignore[arg-type]
        for panel in result.groups.values():
            panel.update({kind: panel.get(kind, {}) for kind in ("contestants", "bounds", "gaps")})
    return results


def _without_empty(value: Any) -> Any:
    """Leave out empty parts."""
    if isinstance(value, dict):
        return {key: _without_empty(one) for key, one in value.items() if one not in (None, "", {}, [])}
    return [_without_empty(one) for one in value] if isinstance(value, list) else value


def _layout(value: Any, levels: int, indent: str = "") -> str:
    """Format as JSON, with a line for each item of the outer `levels` that is long and has items of its own."""
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
