"""List of all figures, and the function that measures one of them."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from benchmarks import environment, report
from benchmarks.harness import CORES, use_cores
from benchmarks.peers import find_module
from benchmarks.processes import ROOT, ContestantFailed
from benchmarks.results import Result

PAGE = ROOT / "docs" / "benchmarks.md"
RAW = ROOT / "benchmarks" / "raw"
#: Module of each figure and arguments of the module's ``measure``, in the order of the page.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "cnn": ("cnn", {}),
    "mlp": ("mlp", {}),
    "all_reduce": ("all_reduce", {}),
    "call": ("call", {}),
    "inside": ("inside", {}),
    "exact": ("exact", {}),
    "plans": ("plans", {}),
    "one_copy": ("one_copy", {}),
    "lstm": ("lstm", {}),
    "step": ("step", {}),
    "excerpt": ("excerpt", {}),
    "readme": ("readme", {}),
    "many_ranks": ("many_ranks", {}),
    "memory": ("memory", {}),
    "start": ("start", {}),
    "instruments": ("instruments", {}),
    "scaling-cnn": ("scaling", {"model": "cnn"}),
    "scaling-mlp": ("scaling", {"model": "mlp"}),
    "scaling-resnet": ("scaling", {"model": "resnet", "ranks": (1, 2), "rounds": 2}),
    "nodes": ("nodes", {}),
    "overlap": ("overlap", {}),
    "rules": ("rules", {}),
    "pytensor_readme": ("pytensor_readme", {}),
    "pytensor_mlp": ("pytensor_mlp", {}),
    "pytensor_plans": ("pytensor_plans", {}),
    "pytensor_start": ("pytensor_start", {}),
    "pytensor_pymc": ("pytensor_pymc", {}),
    "pytensor_pymc_chains": ("pytensor_pymc_chains", {}),
}


def of_this_backend() -> list[str]:
    """Return the names of the figures of the installed backend."""
    on_pytensor = find_module("pytensor")
    return [name for name in FIGURES if name.startswith("pytensor") == on_pytensor]


def measure(name: str, page: Path, raw: Path = RAW, **options: Any) -> Result:
    """Measure one figure, print its rows, and save it.

    The result and the picture are saved next to the page, and the raw data in `raw`. If a contestant fails, the figure
    is saved as failed, in place of its earlier result.
    """
    module = importlib.import_module(name)
    use_cores(None if getattr(module, "ALL_CORES", False) else CORES)
    title, _, method = inspect.cleandoc(module.__doc__ or "").partition("\n")
    result = Result(name.rpartition(".")[2], title.rstrip("."), method.strip(), environment=environment.describe())
    folder = report.folder_of(page, result.processor)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        module.measure(result, **options)
    except ContestantFailed as error:
        print(error)
        result.failure = str(error).splitlines()[0]
    else:
        getattr(module, "draw", report.draw)(result, folder / f"{result.name}.png")
    for contestant, facts in result.facts.items():
        if "kernels" in facts:
            result.kernels.setdefault(facts["kernels"], []).append(contestant)
    result.save(page.with_suffix(".json"))
    result.save_raw(raw / folder.name)
    for row in result.rows:
        print(f"{row.what}: {report.reached(row)}  {report.target(row)}  {row.verdict}", flush=True)
    return result
