"""What a program and its user see of a training loop: a progress bar, `top`, traces, and no warnings of replicas."""

import io
import json
import os
import re
import sys
import warnings

import numpy as np
import pytest
from backend import T, theano
from deadline import wait_for

import synkhronos as synk
from synkhronos import rules
from synkhronos._cli.top import find_sessions
from synkhronos._utils import display

RULES = [rules.LocalSGD(every=3), rules.EASGD(every=3), rules.GoSGD(probability=0.5), rules.BSP()]


def train(session, rule=RULES[0], **options):
    w, x = theano.shared(np.zeros(3), "w"), T.vector("x", "float64")
    change = synk.averaged(x.mean()) if isinstance(rule, rules.BSP) else x.mean()
    f = synk.function([x], w[0] + x.mean(), updates=[(w, 0.9 * w + change)])
    data = [np.arange(20.0 * session)]
    return synk.loop(f, data, params=[w], batch_size=1, rule=rule, **{"epochs": 2, **options})


def spans_of(path, name):
    """Return the number of spans with a name of each rank."""
    events = json.loads(path.read_text())["traceEvents"]
    found = [event["pid"] for event in events if event["ph"] == "X" and event["name"] == name]
    return lambda rank: found.count(rank)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_traces_show_steps_and_exchanges_of_each_rank(session, rule, tmp_path):
    with synk.trace(tmp_path / "trace.json"):
        run = train(session, rule)
    functions = spans_of(tmp_path / "trace.json", "function")
    for rank in range(session):
        assert functions(rank) >= run.steps[rank]
    name = {"average": "average", "centre": "centre", "gossip": "send"}.get(rule.engine)
    if name:
        counts = spans_of(tmp_path / "trace.json", name)
        for rank in range(session):
            # a rank may find the other's mailbox full, and then sends nothing
            assert counts(rank) == run.exchanges[rank] or (name == "send" and counts(rank) > run.exchanges[rank])


def test_top_shows_the_steps_and_exchanges(session):
    seen = []

    def look(run):
        (found,) = [one for one in find_sessions() if one.pid == os.getpid()]
        seen.append((found.status.look(), run.steps, list(run.exchanges)))

    train(session, on_epoch=look, epochs=3)
    for what, steps, exchanges in seen:
        numbers = [tuple(map(int, re.search(r", step (\d+), (\d+) exchanges$", one).groups())) for one in what]
        assert numbers == list(zip(steps, exchanges))
    (found,) = [one for one in find_sessions() if one.pid == os.getpid()]
    assert not any("step" in one for one in found.status.look())


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("rule", [*RULES, None], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("wanted", [True, False])
def test_a_bar_shows_losses_and_speeds_on_a_terminal(synchronize, monkeypatch, rule, wanted):
    synchronize(2)
    monkeypatch.setattr(display, "DELAY", 0.0)
    monkeypatch.setattr(display, "_STEP", 0.001)
    monkeypatch.setenv("COLUMNS", "150")
    terminal = Terminal()
    pattern = r"training:.*\d+ of 80 .*loss \S+ \S+, steps/s \d+ \d+" if rule else r"training:.*\d+ of 40 "

    def shown(run):
        if wanted and run.epoch == 1:
            wait_for(lambda: re.search(pattern, terminal.getvalue()), "the bar")

    if rule is None:
        w, x = theano.shared(np.zeros(3), "w"), T.vector("x", "float64")
        f = synk.function([x], x.mean(), updates=[(w, w + x.mean())], exact=True)
        synk.distribute()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", terminal)
            synk.loop(f, [np.ones(40)], batch_size=1, epochs=2, on_epoch=shown, progress=wanted)
    else:
        train(2, rule)  # compiles, which has a bar of its own
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", terminal)
            train(2, rule, on_epoch=shown, progress=wanted)
    assert wanted or "training" not in terminal.getvalue()


def test_parameters_that_differ_on_purpose_are_not_reported(synchronize):
    synchronize(3, check_replicas=1)
    v, x = theano.shared(0.0, "v"), T.vector("x", "float64")
    differ = []

    def look(run):
        differ.append(synk.check_replicas())
        values = [float(np.ravel(synk.get_value(rank, w))[0]) for rank in range(3)]
        differ.append(len(set(values)) == 3)
        g()

    w = theano.shared(np.zeros(3), "w")
    f = synk.function([x], x.mean(), updates=[(w, 0.9 * w + x.mean())])
    g = synk.function([], w.sum() + v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        synk.loop(f, [np.arange(24.0)], params=[w], batch_size=1, epochs=2, rule=rules.LocalSGD(every=5), on_epoch=look)
    assert differ == [{}, True] * 2
    assert synk.check_replicas() == {}
    synk.set_value(1, w, np.ones(3))
    assert list(synk.check_replicas()) == [w]


def test_after_a_failure_replicas_are_reported(synchronize):
    synchronize(2)
    w, x = theano.shared(np.zeros(3), "w"), T.vector("x", "float64")
    f = synk.function([x], x.mean(), updates=[(w, 0.9 * w + x.mean())])

    def fails(rank, n_ranks, epoch, rng):
        yield [np.full(1, 1.0 + rank)]
        raise OSError("no more")

    with pytest.raises(synk.WorkerError, match="no more"):
        synk.loop(f, fails, params=[w], batch_size=1, steps=5, rule=rules.LocalSGD(every=5))
    assert list(synk.check_replicas()) == [w]
