"""Training loops with training rules on all ranks, by `synkhronos.loop`."""

import psutil

import synkhronos as synk
from benchmarks.contestants._batches import LEARNING_RATE, MOMENTUM
from benchmarks.contestants._networks import build_network, describe
from benchmarks.contestants._serve import compete
from benchmarks.contestants._timed_batches import TIMES, TimedBatches
from synkhronos.extensions.train import make_train_function


def make(model, ranks):
    """Fork, and build a step with Nesterov momentum that each rank makes by itself."""
    synk.fork(ranks)
    graph = build_network(model)
    data, settings = (graph.x, graph.y), (LEARNING_RATE, MOMENTUM)
    step = make_train_function(
        graph.loss, graph.params, *data, "nesterov_momentum", *settings, rule=synk.rules.LocalSGD(every=1)
    ).function
    synk.distribute()

    def run(rule, options, sizes, steps, first=2, n_timed=None):
        """Train; return the steps per second of this node's ranks, the bytes of exchanges, and those on the link.

        Parameters
        ----------
        rule, options : str, dict
            Name and settings of the rule.
        sizes : list of int
            Number of rows of each rank's steps.
        steps : int
            Mean number of steps of the ranks.
        first : int
            Number of steps of a rank before the timed ones.
        n_timed : int, optional
            Number of timed steps. Default: all others.
        """
        TIMES[:] = 0
        before = sent_on_link()
        records = synk.loop(
            step,
            TimedBatches(model, sizes),
            params=graph.params,
            batch_size=sizes[0],
            steps=steps,
            rule=getattr(synk.rules, rule)(**options),
        )
        on_link = sent_on_link() - before
        rates = []
        for times in TIMES[:ranks]:
            times = times[times > 0]
            last = len(times) - 1 if n_timed is None else 1 + first + n_timed
            rates.append((last - 1 - first) / (times[last] - times[1 + first]))
        return [*rates, sum(records.bytes), on_link]

    return run, describe(graph)


def sent_on_link():
    """Return the bytes that this host has sent to others; 0 without a link."""
    links = psutil.net_io_counters(pernic=True)
    return links["eth0"].bytes_sent if "eth0" in links else 0


if __name__ == "__main__":
    compete(make)
