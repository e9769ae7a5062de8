"""Simulation of training rules: P ranks in one process, step by step, with the classes that rank programs use.

`simulate` calls ``gradient_step(rank, x, step)`` for a local update of a rank, which returns the new parameters; steps
count from 1. Random orders of exchanges come from `centre_order` and `gossip_order`.
"""

import dataclasses

import numpy as np

#: The number of parameters of the problems.
N = 6


class Quadratic:
    """A quadratic with its own curvature and minimum on each rank."""

    def __init__(self, n_ranks, dtype):
        rng = np.random.RandomState(1)
        self.x0 = rng.randn(N).astype(dtype)
        self.curvature = rng.uniform(0.2, 1.5, (n_ranks, N)).astype(dtype)
        self.minimum = (2 + rng.randn(n_ranks, N)).astype(dtype)

    def gradient(self, rank, x, step):
        return self.curvature[rank] * (x - self.minimum[rank])


class Logistic:
    """A logistic regression with its own rows on each rank, in minibatches of four rows."""

    def __init__(self, n_ranks, dtype):
        rng = np.random.RandomState(2)
        self.x0 = rng.randn(N).astype(dtype)
        self.rows = rng.randn(n_ranks, 12, N).astype(dtype)
        self.labels = (rng.rand(n_ranks, 12) > 0.5).astype(dtype)

    def gradient(self, rank, x, step):
        batch = slice(step % 3 * 4, step % 3 * 4 + 4)
        rows = self.rows[rank, batch]
        return rows.T @ (1 / (1 + np.exp(-rows @ x)) - self.labels[rank, batch]) / 4


class Network:
    """A network of two tanh units with its own rows on each rank, in minibatches of four rows; it is not convex."""

    def __init__(self, n_ranks, dtype):
        rng = np.random.RandomState(3)
        self.x0 = rng.randn(N).astype(dtype)
        self.rows = rng.randn(n_ranks, 12, 2).astype(dtype)
        self.targets = rng.randn(n_ranks, 12).astype(dtype)

    def gradient(self, rank, x, step):
        batch = slice(step % 3 * 4, step % 3 * 4 + 4)
        rows, weights, out = self.rows[rank, batch], x[:4].reshape(2, 2), x[4:]
        hidden = np.tanh(rows @ weights)
        error = (hidden @ out - self.targets[rank, batch]) / 2
        of_weights = rows.T @ (np.outer(error, out) * (1 - hidden**2))
        return np.concatenate([of_weights.reshape(-1), hidden.T @ error])


@dataclasses.dataclass
class Run:
    """Result of a simulated training.

    ``x`` and ``states`` have one entry per rank. ``log`` lists what happened: ``("send", step, delay)`` and ``("merge",
    steps made, age)`` of averages. ``in_flight`` has the messages of gossip that were not merged, as ``(x, weight)``.
    """

    x: list
    states: list = dataclasses.field(default_factory=list)
    log: list = dataclasses.field(default_factory=list)
    centre: object = None
    weights: object = None
    in_flight: list = dataclasses.field(default_factory=list)


def simulate(rule, gradient_step, x0, n_ranks, n_steps, order=None, rng=None, **options):
    """Train ``n_ranks`` ranks by a rule, each for ``n_steps`` steps, and return a `Run`.

    ``x0`` has shape ``(n,)``, or ``(n_ranks, n)`` for different values. ``order`` is that of the exchanges with a
    centre or by gossip; else ``rng`` draws one. Options of averages: ``nodes``, the node of each rank;
    ``steps_per_epoch`` and ``losses``, the mean loss of each epoch. Option of gossip: ``drain=False`` leaves messages
    in flight.
    """
    rule.check(n_ranks)
    x = [one.copy() for one in np.broadcast_to(x0, (n_ranks, np.shape(x0)[-1]))]
    if rule.engine == "average":
        return _average(rule, gradient_step, x, n_steps, **options)
    rng = np.random.RandomState(0) if rng is None else rng
    if rule.engine == "centre":
        return _centre(
            rule, gradient_step, x, n_steps, centre_order(rule, n_ranks, n_steps, rng) if order is None else order
        )
    assert rule.engine == "gossip"
    order = gossip_order(rule, n_ranks, n_steps, rng) if order is None else order
    return _gossip(rule, gradient_step, x, n_steps, order, **options)


def _average(rule, gradient_step, x, n_steps, nodes=None, steps_per_epoch=None, losses=()):
    ranks = range(len(x))
    if steps_per_epoch is not None:
        rule = rule.plan(steps_per_epoch, n_steps // steps_per_epoch)
    run = Run(x, [rule.begin(one, len(x)) for one in x])
    pending = None

    def merge(made):
        nonlocal pending
        sent_after, sent, received = pending
        age, pending = made - sent_after, None
        for rank in ranks:
            x[rank] = rule.after(x[rank], sent[rank], received[rank], age, run.states[rank])
        run.log.append(("merge", made, age))

    for step in range(1, n_steps + 1):
        if pending and step == pending[0] + rule.delay_at(pending[0]) + 1:
            merge(step - 1)
        for rank in ranks:
            x[rank] = gradient_step(rank, x[rank], step)
        group = rule.exchanges_at(step)
        if group:
            if pending:
                merge(step)
            sent = [rule.before(x[rank], run.states[rank]) for rank in ranks]
            groups = [0] * len(x) if group == "all" else nodes
            members = [[sent[other] for other in ranks if groups[other] == groups[rank]] for rank in ranks]
            pending = step, sent, [np.mean(one, axis=0, dtype=x[0].dtype) for one in members]
            run.log.append(("send", step, rule.delay_at(step)))
        if steps_per_epoch is not None and step % steps_per_epoch == 0 and step // steps_per_epoch <= len(losses):
            for state in run.states:
                rule.on_epoch(losses[step // steps_per_epoch - 1], state)
    if pending:
        merge(n_steps)
    return run


def centre_order(rule, n_ranks, n_steps, rng, slow=None, chunks=(slice(None),)):
    """Return a random order of all exchanges with a centre, as ``(rank, chunk)``.

    Rank ``slow`` takes five times as long. Between the chunks of one exchange there may be chunks of other ranks.
    """
    left = [n_steps // rule.every * len(chunks)] * n_ranks
    order = []
    while any(left):
        speeds = np.array([(0.2 if rank == slow else 1.0) * (left[rank] > 0) for rank in range(n_ranks)])
        rank = rng.choice(n_ranks, p=speeds / speeds.sum())
        order.append((rank, chunks[-left[rank] % len(chunks)]))
        left[rank] -= 1
    return order


def _centre(rule, gradient_step, x, n_steps, order):
    n = len(x[0])
    run = Run(x, [rule.begin(one, len(x)) for one in x], centre=x[0].copy())
    made, exchanged = [0] * len(x), [n] * len(x)

    def advance(rank, steps):
        for _ in range(min(steps, n_steps - made[rank])):
            made[rank] += 1
            x[rank] = gradient_step(rank, x[rank], made[rank])

    for rank, chunk in order:
        if exchanged[rank] == n:
            advance(rank, rule.every)
            exchanged[rank] = 0
        state = {name: one[chunk] if isinstance(one, np.ndarray) else one for name, one in run.states[rank].items()}
        x[rank][chunk], run.centre[chunk] = rule.meet(x[rank][chunk].copy(), run.centre[chunk].copy(), state)
        exchanged[rank] += len(x[rank][chunk])
    for rank in range(len(x)):
        advance(rank, n_steps)
    return run


def replay_centres(rule, gradient_step, x0, nodes, steps, order):
    """Return the mean of the nodes' centres, and their sum after each average less that before it.

    ``nodes`` has the node of each rank, ``steps`` the number of steps of each, and ``order`` the recorded order of
    exchanges on each node, as `Run.order`. The nodes' centres are averaged where all of them have sent theirs.
    """
    n_nodes = 1 + max(nodes)
    x, made = [x0.copy() for _ in nodes], [0] * len(nodes)
    states = [rule.begin(x0.copy(), nodes.count(node)) for node in nodes]
    centres, sent, merged = [x0.copy() for _ in range(n_nodes)], [[] for _ in range(n_nodes)], [0] * n_nodes
    left = [[one for one in order if nodes[one[1]] == node] for node in range(n_nodes)]
    changes = {}

    def advance(rank, until):
        while made[rank] < until:
            made[rank] += 1
            x[rank] = gradient_step(rank, x[rank], made[rank])

    while any(left):
        before = sum(map(len, left))
        for node, events in enumerate(left):
            while events:
                _, rank, kind, step, _ = events[0]
                number = merged[node]
                if kind == "merge" and any(len(one) <= number for one in sent):
                    break  # another node has not sent its centre yet
                advance(rank, step)
                if kind == "meet":
                    x[rank], centres[node] = rule.meet(x[rank], centres[node], states[rank])
                elif kind == "send":
                    sent[node].append(centres[node].copy())
                else:
                    change = np.mean([one[number] for one in sent], axis=0) - sent[node][number]
                    centres[node] = centres[node] + change
                    changes[number] = changes.get(number, 0) + change
                    merged[node] += 1
                del events[0]
        assert sum(map(len, left)) < before, "an average was not made on all nodes"
    assert len(set(merged)) == 1 and made == steps
    return np.mean(centres, axis=0), [changes[number] for number in sorted(changes)]


def replay_gossip(rule, gradient_step, x0, nodes, steps, order):
    """Return the mean of the parameters of ranks on several nodes by their weights, and the weights.

    The arguments are those of `replay_centres`. Messages on their way at the end are merged.
    """
    x, made, weights, slots = [x0.copy() for _ in nodes], [0] * len(nodes), [1 / len(nodes)] * len(nodes), {}
    n_nodes = 1 + max(nodes)
    left = [[one for one in order if nodes[one[1]] == node] for node in range(n_nodes)]

    def advance(rank, until):
        while made[rank] < until:
            made[rank] += 1
            x[rank] = gradient_step(rank, x[rank], made[rank])

    while any(left):
        for events in left:
            while events and events[0][2] != "nodes":
                _, rank, kind, step, other = events.pop(0)
                advance(rank, step)
                assert nodes[rank] == nodes[other]
                if kind == "send":
                    weights[rank], sent = rule.split(weights[rank])
                    slots[rank, other] = x[rank].copy(), sent
                else:
                    x[rank], weights[rank] = rule.merge(x[rank], weights[rank], *slots.pop((other, rank)))
        if any(left):
            exchanges = [events.pop(0) for events in left]
            for _, rank, _, step, _ in exchanges:
                advance(rank, step)
            leaders = [rank for _, rank, *_ in exchanges]
            kept, sent = zip(*(rule.split(weights[rank]) for rank in leaders))
            weight = float(np.mean(sent))
            mean = np.mean([w * x[rank] for w, rank in zip(sent, leaders)], axis=0) / weight
            for own, rank in zip(kept, leaders):
                x[rank], weights[rank] = rule.merge(x[rank], own, mean, weight)
    for rank, n_steps in enumerate(steps):
        advance(rank, n_steps)
    assert not slots
    return sum(w * one for w, one in zip(weights, x)) / sum(weights), weights


def gossip_order(rule, n_ranks, n_steps, rng, slow=None):
    """Return a random order of gossip, as ``("send" or "merge", rank, steps made by the rank, other rank)``.

    Rank ``slow`` takes five times as long. A rank that finds its earlier message to the same rank unread sends nothing.
    """
    made, unread, order = [0] * n_ranks, set(), []
    while min(made) < n_steps:
        speeds = np.array([(0.2 if rank == slow else 1.0) * (made[rank] < n_steps) for rank in range(n_ranks)])
        rank = rng.choice(n_ranks, p=speeds / speeds.sum())
        for sender in [sender for sender, receiver in sorted(unread) if receiver == rank]:
            order.append(("merge", rank, made[rank], sender))
            unread.remove((sender, rank))
        made[rank] += 1
        if n_ranks > 1 and rng.rand() < rule.probability:
            receiver = (rank + rng.randint(1, n_ranks)) % n_ranks
            if (rank, receiver) not in unread:
                order.append(("send", rank, made[rank], receiver))
                unread.add((rank, receiver))
    return order


def _gossip(rule, gradient_step, x, n_steps, order, drain=True):
    run = Run(x, weights=[1 / len(x)] * len(x))
    made, slots = [0] * len(x), {}

    def advance(rank, steps):
        while made[rank] < steps:
            made[rank] += 1
            x[rank] = gradient_step(rank, x[rank], made[rank])

    def merge(rank, sender):
        x[rank], run.weights[rank] = rule.merge(x[rank], run.weights[rank], *slots.pop((sender, rank)))

    for kind, rank, steps, other in order:
        advance(rank, steps)
        if kind == "merge":
            merge(rank, other)
        else:
            assert (rank, other) not in slots, "the slot is occupied"
            run.weights[rank], sent = rule.split(run.weights[rank])
            slots[rank, other] = x[rank].copy(), sent
    if drain:
        for rank in range(len(x)):
            advance(rank, n_steps)
        for sender, rank in sorted(slots):
            merge(rank, sender)
    run.in_flight = list(slots.values())
    return run
