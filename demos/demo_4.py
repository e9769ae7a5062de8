"""Demo 4: minibatches of inputs with `batch`, selected before the data is scattered.

A call selects rows of the full data set, and each rank reads its own shard of them. No process copies all rows of a
shuffled minibatch. All results are compared with plain Theano.
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

    rng = np.random.RandomState(0)
    x_data, y_data = rng.rand(50, 3), rng.rand(50)
    x, y = T.dmatrix("x"), T.dvector("y")
    error = T.sqr(x.sum(axis=1) - y)
    f = synk.function([x, y], [error.mean(), (error, "gather")])
    f_theano = theano.function([x, y], [error.mean(), error])
    synk.distribute()
    x_synk, y_synk = synk.data(x_data), synk.data(y_data)

    batches = {
        "the first 20": (20, slice(20)),
        "a slice": (slice(10, 31), slice(10, 31)),
        "every second of the last 30": (slice(-30, None, 2), slice(-30, None, 2)),
        "a list, with a repetition": ([3, 1, 4, 1, 5], [3, 1, 4, 1, 5]),
        "a boolean mask": (y_data > 0.5, y_data > 0.5),
    }
    for what, (batch, index) in batches.items():
        mean, all_errors = f(x_synk, y_synk, batch=batch)
        expected_mean, expected_errors = f_theano(x_data[index], y_data[index])
        check(f"{what}, mean", mean, expected_mean)
        check(f"{what}, gathered in order", all_errors, expected_errors)

    # An epoch of shuffled minibatches. The last one is smaller, and its mean is still exact.
    order = rng.permutation(50)
    for start in range(0, 50, 16):
        batch = order[start : start + 16]
        got = f(x_synk, y_synk, batch=batch, output_subset=[0])[0]
        check(f"shuffled, {len(batch)} rows as {list(f.counts)}", got, f_theano(x_data[batch], y_data[batch])[0])

    # `minibatch=True`: the data already is the minibatch. Here, y has the rows 16 to 31 only.
    y_part = synk.data(y_data[16:32], minibatch=True)
    got = f(x_synk, y_part, batch=slice(16, 32))[0]
    check("x by batch, y is the batch", got, f_theano(x_data[16:32], y_data[16:32])[0])

    # The same with a shuffled batch: row i of y belongs to the i-th index.
    batch = order[:12]
    y_part.set_value(y_data[batch])
    got = f(x_synk, y_part, batch=batch)[0]
    check("x by indices, y is the batch", got, f_theano(x_data[batch], y_data[batch])[0])
    synk.close()
    print("demo 4: all results agree with those of one process")


if __name__ == "__main__":
    main()
