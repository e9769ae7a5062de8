"""Demo 1: functions on all ranks, ops that combine their outputs, and slices.

`synk.function` replaces `theano.function`. Each rank computes on its shard of the inputs, and the op of each output
states how the ranks' values are combined. All results are compared with plain Theano.
"""

import argparse

import numpy as np

import synkhronos as synk

try:
    import theano
    import theano.tensor as T
except ImportError:  # Python 3.12 and later
    import pytensor as theano
    import pytensor.tensor as T


def check(what, got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=what)
    print(f"{what:50} {np.array2string(np.asarray(got), precision=4, threshold=6)}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one for each device)")
    ranks = synk.fork(parser.parse_args(argv).ranks)
    print(f"{ranks} rank(s)")

    # 15 rows do not divide evenly by 2 or 4: the shards differ in length, and the results are still exact.
    x_data = np.random.RandomState(0).rand(15, 4)
    w_data = np.arange(4.0)
    x, w = T.dmatrix("x"), T.dvector("w")
    y = T.dot(x, w)

    # x is scattered, w is broadcast to every rank. Each output has a different op.
    ops = ["avg", "sum", "max", "min", "prod", "gather"]
    reduced = {"avg": y.mean(), "sum": y.sum(), "max": y.max(), "min": y.min(), "prod": y.prod()}
    reduced["gather"] = y
    f = synk.function([x], [(reduced[op], op) for op in ops], bcast_inputs=[w])
    f_theano = theano.function([x, w], [reduced[op] for op in ops])
    total = theano.shared(np.zeros(4), "total")
    g = synk.function([x], updates=[(total, total + x.sum(axis=0), "sum")])
    synk.distribute()

    expected = f_theano(x_data, w_data)
    for op, got, value in zip(ops, f(x_data, w_data), expected):
        check(f"one call, {op}", got, value)
    print(f"data points of each rank: {list(f.counts)}")
    assert sum(f.counts) == len(x_data)

    # In slices: each rank calls its Theano function three times and combines the results.
    for op, got, value in zip(ops, f(x_data, w_data, num_slices=3), expected):
        check(f"three slices on each rank, {op}", got, value)

    # Pass inputs by name, compute some of the outputs, call the function in this process only.
    check("inputs by name", f(x=x_data, w=w_data)[0], expected[0])
    check("outputs 1 and 2", f(x_data, w_data, output_subset=[1, 2]), expected[1:3])
    check("as plain Theano", f.as_theano(x_data, w_data)[0], expected[0])

    # An update changes each rank's own copy; collectives combine the copies (see demo 3).
    g(x_data, num_slices=2)
    check("an update, summed over slices and ranks", np.sum(synk.gather(total), 0), x_data.sum(0))
    synk.close()
    print("demo 1: all results agree with those of one process")


if __name__ == "__main__":
    main()
