"""Medians, quartiles and ratios of numbers that were measured in rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """Measurements of one contestant: a list of numbers for each round."""

    rounds: list[list[float]]

    @property
    def median(self) -> float:
        """The median of all numbers."""
        return float(np.median(np.concatenate(self.rounds)))

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of all numbers."""
        low, high = np.percentile(np.concatenate(self.rounds), [25, 75])
        return float(low), float(high)

    @property
    def medians(self) -> list[float]:
        """The median of each round."""
        return [float(np.median(numbers)) for numbers in self.rounds]

    def scaled(self, factor: float) -> Sample:
        """Return a sample with all numbers multiplied by a factor."""
        return Sample([[number * factor for number in numbers] for numbers in self.rounds])


@dataclass(frozen=True)
class Estimate:
    """Number with its spread: the quartiles of the same number computed for each round."""

    value: float
    low: float
    high: float


def ratio(numerator: Sample, denominator: Sample) -> Estimate:
    """Divide the medians of two samples that were measured in turns."""
    rounds = np.divide(numerator.medians, denominator.medians)
    return _estimate(numerator.median / denominator.median, rounds)


def difference(minuend: Sample, subtrahend: Sample) -> Estimate:
    """Subtract the medians of two samples that were measured in turns."""
    rounds = np.subtract(minuend.medians, subtrahend.medians)
    return _estimate(minuend.median - subtrahend.median, rounds)


def confidence(numerator: Sample, denominator: Sample) -> tuple[float, float]:
    """Return bounds between which the median of the rounds' ratios lies with a probability of at least 95 %.

    They are order statistics, whose ranks are quantiles of the binomial distribution. With fewer than six rounds, they
    are the smallest and the largest ratio, and the probability is lower.
    """
    ratios = sorted(np.divide(numerator.medians, denominator.medians))
    n, below, rank = len(ratios), 0.0, 0
    while rank < n // 2 and below + math.comb(n, rank) / 2**n <= 0.025:
        below += math.comb(n, rank) / 2**n
        rank += 1
    return float(ratios[max(0, rank - 1)]), float(ratios[n - max(1, rank)])


def absolute(sample: Sample) -> Estimate:
    """Return the median and the quartiles of one sample."""
    return Estimate(sample.median, *sample.quartiles)


def _estimate(value: float, rounds: np.ndarray) -> Estimate:
    low, high = np.percentile(rounds, [25, 75])
    return Estimate(float(value), float(low), float(high))
