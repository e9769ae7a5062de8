"""Simulation of a Scan on several ranks in lockstep: all ranks execute a step before the next one begins."""

import numpy as np

from synkhronos._backends import ops


def scan(node, given, evaluate):
    """Compute the outputs of a Scan on each rank.

    Parameters
    ----------
    node : Apply
    given : list of list
        The values of the node's inputs, for each rank.
    evaluate : callable
        ``evaluate(outputs, values)`` returns the values of all variables. Values have an entry for each rank.

    Returns
    -------
    list of list
        The values of the node's outputs, for each rank.
    """
    op, ranks = node.op, range(len(given))
    slices = op.info if hasattr(op.info, "tap_array") else op
    taps_of, new_taps = slices.tap_array, slices.mit_mot_out_slices
    n_mit_mot, n_states, n_taps = len(new_taps), len(taps_of), sum(map(len, taps_of))
    if not hasattr(node.tag, "loop"):
        node.tag.loop = ops.read_loop(node)
    loop = node.tag.loop
    n_sequences, n_shared = len(loop.sequences), len(loop.shared)
    (n_steps,) = {int(values[0]) for values in given}
    if n_steps <= 0:
        raise NotImplementedError("Theano does not execute loops of no steps")
    sequences = [op.outer_seqs(values) for values in given]
    states = [[value.copy() for value in values[1 + n_sequences :][:n_states]] for values in given]
    shared = [list(values[1 + n_sequences + n_states :][:n_shared]) for values in given]
    others = [list(op.outer_non_seqs(values)) for values in given]
    results = [[[None] * int(n) for n in op.outer_nitsot(values)] for values in given]
    firsts = [-min(taps) for taps in taps_of]
    done = 0
    while done < n_steps:
        places = [first + done for first in firsts]
        inputs = [
            [
                *(one[done] for one in sequences[rank]),
                *(states[rank][i][places[i] + tap] for i in range(n_states) for tap in taps_of[i]),
                *shared[rank],
                *others[rank],
            ]
            for rank in ranks
        ]
        assert len(inputs[0]) == len(loop.inputs) == n_sequences + n_taps + n_shared + len(others[0])
        inputs = [list(map(np.array, each)) if not shared[0] else each for each in inputs]
        values = evaluate(loop.outputs, dict(zip(loop.inputs, map(list, zip(*inputs)))))
        done += 1
        for rank in ranks:
            news = [values[output][rank] for output in loop.outputs]
            for i in range(n_states):
                for tap in new_taps[i] if i < n_mit_mot else [0]:
                    states[rank][i][places[i] + tap] = news.pop(0)
            for result in results[rank]:
                result[done - 1] = np.array(news.pop(0))
            shared[rank] = [news.pop(0) for _ in shared[rank]]
        if loop.is_while and {bool(values[loop.outputs[-1]][rank]) for rank in ranks} == {True}:
            break
    results = [list(map(_stacked, each)) for each in results]
    for rank in ranks:
        for i in range(n_mit_mot, n_states):
            states[rank][i] = _trimmed(states[rank][i], firsts[i] + done, n_steps - done)
        results[rank] = [_trimmed(result, done, n_steps - done) for result in results[rank]]
    return [[*states[rank], *results[rank], *shared[rank]] for rank in ranks]


def _stacked(results):
    """Stack the results of steps, with zeros for steps that were not executed."""
    return np.array([np.zeros_like(results[0]) if result is None else result for result in results])


def _trimmed(value, n_written, n_left):
    """Set elements that were not written to zero, and cut off the steps that an early end left out."""
    value[n_written:] = 0
    return value[: len(value) - n_left] if n_left and len(value) > n_written else value
