"""Made-up costs of a machine that make one plan clearly faster, and functions for tests of the choice."""

import json

import numpy as np
from backend import T, theano

from synkhronos._costs import Curve, Grid, Machine, Rates

#: With these constants, the controller is faster for less than about 20 kB: a command takes 10 ms, a pass over memory
#: 1 µs for each byte, and half of that for each byte if all ranks compute.
PASSES = Curve((1.0, 1e9), (1e-6, 1e3))
GRID = Grid((1, 2), (1, 2), (1, 2), (1e-9,) * 8)
RATES = Rates({"float32": GRID, "float64": GRID}, PASSES, 0.0, 0.0)
FREE = Curve((1.0, 2.0), (0.0, 0.0))
CONSTANTS = Machine(RATES, RATES, 0.0, 0.01, 0.0, FREE, FREE, Curve((1.0, 1e9), (0.2, 0.2)))


def stored(path, kind="functions"):
    """Return the entries of a kind in the file, over all machines."""
    entries = json.loads(path.read_text())["1"].get(kind, {})
    return [one for found in entries.values() for one in found.values()] if kind == "functions" else entries


def values(n):
    return np.random.RandomState(n).randn(n, 3)


def by(function):
    """Return the plan of a function's last call, from the data points of each rank."""
    return "controller" if function.counts[1:] == (0,) * (len(function.counts) - 1) else "rows"


def trained(build, **options):
    """Return a variable and a function that updates it."""
    x, total = T.dmatrix("x"), theano.shared(np.zeros(3), "total")
    function = build([x], T.exp(x).sum(), updates=[(total, 0.9 * total + x.sum(axis=0))], **options)
    return total, function
