"""Votes of node leaders: each gets all of them, with few messages, whatever the order in which these arrive."""

import math
import random

import pytest

from synkhronos._multinode.node_messages import Votes

PLACE = 3, 0


class Leaders:
    """Leaders that are connected by messages, which `deliver` delivers in random order."""

    def __init__(self, n, seed=0):
        self.chance = random.Random(seed)
        self.in_flight = []
        self.n_sent = [0] * n
        self.all = [Votes(node, n, self.sender(node)) for node in range(n)]

    def sender(self, node):
        def send(other, message):
            assert other != node
            self.n_sent[node] += 1
            place, votes = message
            self.in_flight.append((other, place, dict(votes)))

        return send

    def deliver(self):
        """Deliver messages until there are none; leaders pass on what they have received."""
        while self.in_flight:
            other, place, votes = self.in_flight.pop(self.chance.randrange(len(self.in_flight)))
            self.all[other].take(place, votes)
            self.all[other].pass_on(place)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 64])
def test_each_leader_gets_all_votes_with_few_messages(n):
    for seed in range(5):
        leaders = Leaders(n, seed)
        order = list(range(n))
        leaders.chance.shuffle(order)
        for i, node in enumerate(order):
            leaders.all[node].cast(PLACE, f"vote {node}")
            if i == leaders.chance.randrange(n):
                leaders.deliver()
            assert i == n - 1 or all(len(one.of(PLACE)) < n for one in leaders.all)
        leaders.deliver()
        assert all(one.of(PLACE) == {node: f"vote {node}" for node in range(n)} for one in leaders.all)
        assert max(leaders.n_sent) <= math.ceil(math.log2(n))


@pytest.mark.parametrize("n", [4, 7, 16])
def test_the_root_learns_which_leader_is_silent(n):
    for silent in range(1, n):
        leaders = Leaders(n)
        for node in set(range(n)) - {silent}:
            leaders.all[node].cast(PLACE, node)
        leaders.deliver()
        for _ in range(n):  # as often as the depth of the tree: a leader passes on what has come late, too
            for one in leaders.all:
                one.pass_on(PLACE, is_late=True)
            leaders.deliver()
        below = set(leaders.all[silent]._below)  # a silent leader does not pass on what it gets
        missing = set(range(n)) - set(leaders.all[0].of(PLACE))
        assert silent in missing and missing <= below
        leaders.all[silent].cast(PLACE, silent)
        leaders.deliver()
        assert all(len(one.of(PLACE)) == n for one in leaders.all)


def test_places_are_apart_and_are_dropped():
    leaders = Leaders(4)
    for place in ((3, 0), (3, 1), (4, 0)):
        for node, one in enumerate(leaders.all):
            one.cast(place, (place, node))
    leaders.deliver()
    first = leaders.all[0]
    assert first.of((3, 1))[2] == ((3, 1), 2)
    first.drop_before(4, (3, 1))
    assert first.of((3, 0)) == {} and len(first.of((3, 1))) == len(first.of((4, 0))) == 4
    first.drop((4, 0))
    assert first.of((4, 0)) == {}
