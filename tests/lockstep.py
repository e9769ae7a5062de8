"""Loops, of which all ranks execute the same step before the next one begins: a Scan, as its documentation has it."""

import numpy as np


def scan(node, given, evaluate):
    """What a Scan gives on each rank.

    Parameters
    ----------
    node : Apply
    given : list of list
        For each rank the values of the node's inputs.
    evaluate : callable
        Of some outputs and values of inputs, with an entry for each rank, it makes those of all variables.

    Returns
    -------
    list of list
        For each rank the values of the node's outputs.
    """
    op, ranks = node.op, range(len(given))
    n_states, n_taps = op.n_mit_mot + op.n_mit_sot + op.n_sit_sot, sum(map(len, op.tap_array))
    (n_steps,) = {int(values[0]) for values in given}
    if n_steps <= 0:
        raise NotImplementedError("Theano does not execute loops of no steps")
    sequences = [op.outer_seqs(values) for values in given]
    states = [[value.copy() for value in values[1 + op.n_seqs :][:n_states]] for values in given]
    shared = [list(op.outer_shared(values)) for values in given]
    others = [list(op.outer_non_seqs(values)) for values in given]
    results = [[[None] * int(n) for n in op.outer_nitsot(values)] for values in given]
    firsts = [-min(taps) for taps in op.tap_array]
    done = 0
    while done < n_steps:
        places = [first + done for first in firsts]
        inputs = [
            [
                *(one[done] for one in sequences[rank]),
                *(states[rank][i][places[i] + tap] for i in range(n_states) for tap in op.tap_array[i]),
                *shared[rank],
                *others[rank],
            ]
            for rank in ranks
        ]
        assert len(inputs[0]) == len(op.inputs) == op.n_seqs + n_taps + len(shared[0]) + len(others[0])
        inputs = [list(map(np.array, each)) if not shared[0] else each for each in inputs]
        values = evaluate(op.outputs, dict(zip(op.inputs, map(list, zip(*inputs)))))
        done += 1
        for rank in ranks:
            news = [values[output][rank] for output in op.outputs]
            for i in range(n_states):
                for tap in op.mit_mot_out_slices[i] if i < op.n_mit_mot else [0]:
                    states[rank][i][places[i] + tap] = news.pop(0)
            for result in results[rank]:
                result[done - 1] = np.array(news.pop(0))
            shared[rank] = [news.pop(0) for _ in shared[rank]]
        if op.as_while and {bool(values[op.outputs[-1]][rank]) for rank in ranks} == {True}:
            break
    results = [list(map(_stacked, each)) for each in results]
    for rank in ranks:
        for i in range(op.n_mit_mot, n_states):
            states[rank][i] = _trimmed(states[rank][i], firsts[i] + done, n_steps - done)
        results[rank] = [_trimmed(result, done, n_steps - done) for result in results[rank]]
    return [[*states[rank], *results[rank], *shared[rank]] for rank in ranks]


def _stacked(results):
    """An array of the results of steps, with zeros where there was no step."""
    return np.array([np.zeros_like(results[0]) if result is None else result for result in results])


def _trimmed(value, n_written, n_left):
    """With zeros where nothing was written, and without what was left out by an early end."""
    value[n_written:] = 0
    return value[: len(value) - n_left] if n_left and len(value) > n_written else value
