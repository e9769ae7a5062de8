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
    sequences = [op.outer_seqs(values) for values in given]
    states = [[value.copy() for value in values[1 + op.n_seqs :][:n_states]] for values in given]
    shared = [list(op.outer_shared(values)) for values in given]
    others = [list(op.outer_non_seqs(values)) for values in given]
    results = [[[] for _ in range(op.n_nit_sot)] for _ in given]
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
                result.append(np.array(news.pop(0)))
            shared[rank] = [news.pop(0) for _ in shared[rank]]
        if op.as_while and {bool(values[op.outputs[-1]][rank]) for rank in ranks} == {True}:
            break
    if op.as_while:
        states = [[value[: first + done] for value, first in zip(each, firsts)] for each in states]
    types = op.outer_nitsot_outs(node.outputs)
    results = [
        [np.array(result) if result else np.zeros([0] * one.ndim, one.dtype) for result, one in zip(each, types)]
        for each in results
    ]
    return [[*states[rank], *results[rank], *shared[rank]] for rank in ranks]
