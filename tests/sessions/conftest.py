"""Fixtures for tests of sessions: sessions of two and three ranks, a function, replicated variables, made-up costs."""

import pytest
from collective_values import variable
from made_up_costs import CONSTANTS
from summing_function import sum_of

import synkhronos as synk
from synkhronos._api.calibration import name_of_machine
from synkhronos._costs import Store
from synkhronos._session import held


@pytest.fixture
def two(synchronize):
    """Make or reuse a session of two ranks, and return their number."""
    return synchronize(2)


@pytest.fixture
def three(synchronize):
    """Make or reuse a session of three ranks, and return their number."""
    return synchronize(3)


@pytest.fixture
def summing(two):
    """Return a function that sums a vector of float64 over all ranks."""
    return sum_of("float64", 1)


@pytest.fixture
def var_of(session):
    """Return a function of a dtype and a number of dimensions that returns a replicated variable."""
    return variable


@pytest.fixture
def costs(tmp_path, monkeypatch):
    """Return the path of a file of costs for this test. Costs count as measured while the cores were free."""
    for module in ("calibration", "choice"):
        monkeypatch.setattr(f"synkhronos._api.{module}.busy", lambda: 0.0)
    path = tmp_path / "costs.json"
    monkeypatch.setenv("SYNKHRONOS_COSTS", str(path))
    return path


@pytest.fixture
def automatic(costs, no_session):
    """Return a function that makes a session of some ranks with the made-up constants, and the default plan."""

    def fork(n_ranks, **options):
        synk.fork(n_ranks, use_gpu=False, plan="auto", **options)
        Store(str(costs)).put("machines", name_of_machine(held(), synk.__version__), value=CONSTANTS)
        return n_ranks

    return fork
