"""Each sharding rule on simulated ranks: a sample of generated graphs; `make fuzz-sharding` runs all of them."""

import itertools

import numpy as np
import pytest
from backend import T
from sharding_rule_cases import FAMILIES
from sharding_rule_programs import run
from simulated_ranks import Divided, check

from synkhronos._backends import ops
from synkhronos._sharding import checking as failures
from synkhronos._sharding import lengths as following
from synkhronos._sharding.placements import Placed, Shard
from synkhronos._sharding.rules import REPLICATED_RULES, RULES

SHARE = 0.05

#: Collected before any test runs, because docstring examples register rules, too.
KINDS = {kind for kind in (*RULES, *REPLICATED_RULES) if kind.__module__ != "synkhronos._backends.common"}


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_shapes_on_ranks(name):
    family, checks = FAMILIES[name], itertools.cycle([True, False])
    applied, wrong = run(family, SHARE, each=lambda program: program.check(checks_shapes=next(checks)))
    assert not wrong, "\n\n".join(f"{program}\n{trace}" for program, trace in wrong)
    assert family.ops <= applied.divided.keys(), "rules that were not applied"


def test_each_rule_has_cases():
    assert set().union(*(family.ops for family in FAMILIES.values())) == KINDS


def transposed(walk, node):
    """Apply a wrong rule for transposition: the sharded axis does not move."""
    return [Placed(node.op(walk.new(node.inputs[0])), walk.placement(node.inputs[0]))]


def kept(walk, node):
    """Apply a wrong rule for products: a contracted sharded axis is treated as one of the result."""
    a, b = node.inputs
    return [Placed(node.op(walk.new(a), walk.sharded(b, Shard(0))), Shard(0))]


x = T.dmatrix("x")
WRONG = {
    "transposing": (ops.DimShuffle, transposed, lambda: x.T, r"\(3, 5\)", r"\(5, 10\)", r"\(3, 10\)"),
    "product": (ops.Dot, kept, lambda: T.dot(x.dimshuffle(1, 0), x), r"\(3, 3\)", r"\(5, 3\)", r"\(3, 3\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found_at_its_node(name, monkeypatch):
    kind, rule, build, got, expected, serial = WRONG[name]
    monkeypatch.setitem(RULES, kind, rule)
    divided, value = Divided([build()], {x: 0}, checks_shapes=True), np.ones((10, 3))
    message = rf"{kind.__name__.lower()}.* gives shape {got} on this rank, expected {expected}: .* shape is {serial}"
    with pytest.raises(AssertionError, match=f"(?is){message}"):
        divided.compare({x: value}, {}, [5, 5])


@pytest.fixture
def failing(monkeypatch):
    """Make the analyses of products raise an error."""

    def fail(*arguments):
        raise ZeroDivisionError("a fault of the analysis")

    monkeypatch.setitem(RULES, ops.Dot, fail)
    monkeypatch.setitem(following._LENGTH_RULES, ops.Dot, fail)
    monkeypatch.setattr(failures, "_logged", set())


def test_a_failed_analysis_takes_the_slower_path(failing, monkeypatch, caplog):
    monkeypatch.setenv("SYNKHRONOS_RAISE_ANALYSIS_ERRORS", "0")
    y = T.dmatrix("y")
    divided = check([T.dot(x, y), T.dot(y, y)], {x: np.ones((4, 2)), y: np.eye(2)}, {x: 0}, ranks=(1, 2, 3))
    assert [reason for _, reason in divided.walk.gathered] == ["its sharding rule failed"]
    logged = [record.getMessage().lower() for record in caplog.records if record.levelname == "WARNING"]
    failed = {one.split(" failed (")[0] for one in logged}
    assert (failed, len(logged)) == ({"the analysis of lengths of dot", "the sharding rule of dot"}, 2)
    assert all("zerodivisionerror: a fault of the analysis" in one for one in logged)


def test_a_failed_analysis_is_an_error_in_tests(failing):
    with pytest.raises(ZeroDivisionError):
        Divided([T.dot(x, x.T)], {x: 0})
