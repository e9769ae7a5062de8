"""Predict steps on more hosts than can be measured, from measurements on two hosts."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results import Result
from benchmarks.samples import Sample

HOSTS = (2, 4, 8, 16, 32, 64)
GRADIENTS = {"ResNet-50": 25_600_000, "MLP": 1_276_810}  # float32
ITEM = 4  # bytes


@dataclass(frozen=True)
class Line:
    """Cost model of an all-reduce over hosts.

    Parameters
    ----------
    alpha : float
        Seconds for each other host, at any size.
    beta : float
        Seconds for each byte of float32 that a host sends. Elements with a smaller wire dtype count as float32.
    """

    alpha: float
    beta: float

    @classmethod
    def through(cls, few_seconds: float, few: int, many_seconds: float, many: int) -> Line:
        """Return the model that fits two measurements on two hosts, of `few` and of `many` float32 elements."""
        beta = (many_seconds - few_seconds) / (ITEM * (many - few))  # each of two hosts sends the array's size
        return cls(max(0.0, few_seconds - beta * ITEM * few), beta)

    def seconds(self, hosts: int, elements: int) -> float:
        """Return the seconds of an all-reduce: each host sends 2·(N−1)/N of the array, and messages to N−1 others."""
        return (hosts - 1) * self.alpha + self.beta * ITEM * elements * 2 * (hosts - 1) / hosts


def predict(result: Result, lines: dict[str, Line], alone: Sample) -> None:
    """Add tables of predictions: exchanges of gradients, and steps of the MLP with a fixed batch for each host.

    Parameters
    ----------
    result : Result
        The tables are added to it.
    lines : dict of Line
        Cost models by their names, which become part of the titles.
    alone : Sample
        Seconds of a step of the MLP in plain Theano for the images of one host.
    """
    for what, line in lines.items():
        rows = []
        for hosts in HOSTS:
            exchange, other = (1e3 * line.seconds(hosts, GRADIENTS[name]) for name in ("ResNet-50", "MLP"))
            own = 1e3 * alone.median
            rows.append([hosts, exchange, other, own + other, 100 * own / (own + other)])
        title = f"Prediction, not measured: {what}, α = {1e6 * line.alpha:.0f} µs, β = {1e9 * line.beta:.2f} ns/byte"
        columns = [
            "hosts",
            "exchange of ResNet-50's gradient (ms)",
            "exchange of the MLP's gradient (ms)",
            "step of the MLP, 250 images on each host (ms)",
            "of which computing (%)",
        ]
        result.tables[title] = {"columns": columns, "rows": rows}
