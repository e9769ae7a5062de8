"""Demo 5: minibatches of shared variables with `batch_s`, selected after the data is scattered.

Data that is used many times can be scattered into shared variables, which are on the devices. Each rank keeps its
shard, and a call selects rows of each shard. All results are compared with plain Theano.
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
    x_data, y_data = rng.rand(10 * ranks + 3, 4), rng.rand(10 * ranks + 3)
    x, y = T.dmatrix("x"), T.dvector("y")
    error = T.sqr(x.mean(axis=1) - y)
    x_shared = theano.shared(np.zeros((1, 4)), "x_shared")
    y_shared = theano.shared(np.zeros(1), "y_shared")
    f = synk.function(
        [],
        [error.mean(), (error, "gather")],
        givens={x: x_shared, y: y_shared},
        sliceable_shareds=[x_shared, y_shared],
    )
    f_theano = theano.function([x, y], [error.mean(), error])
    synk.distribute()

    synk.scatter([x_shared, y_shared], [x_data, y_data])
    lengths = synk.get_lengths(y_shared)
    starts = np.cumsum([0, *lengths[:-1]])
    print(f"rows of each rank: {lengths}")

    def compare(what, batch_s, rows, **arguments):
        """Compare a call with one of plain Theano on the same rows of the full data."""
        mean, all_errors = f(batch_s=batch_s, **arguments)
        expected_mean, expected_errors = f_theano(x_data[rows], y_data[rows])
        check(f"{what}, mean", mean, expected_mean)
        check(f"{what}, gathered", all_errors, expected_errors)

    every = np.arange(len(x_data))
    compare("everything", None, every)
    compare("everything, in three slices", None, every, num_slices=3)

    # Select the same rows of each shard.
    compare("a slice for all ranks", slice(2, 7), [s + k for s in starts for k in range(2, 7)])
    compare("a list for all ranks", [5, 0, 9], [s + k for s in starts for k in (5, 0, 9)])

    # Select different rows on each rank, by slices or by lists of different lengths.
    slices = [slice(rank, rank + 4) for rank in range(ranks)]
    rows = [s + rank + k for rank, s in enumerate(starts) for k in range(4)]
    compare("a slice for each rank", slices, rows)
    lists = [rng.permutation(length)[: 3 + rank] for rank, length in enumerate(lengths)]
    rows = np.concatenate([s + chosen for s, chosen in zip(starts, lists)])
    compare("a list for each rank", lists, rows)
    compare("a list for each rank, in two slices", lists, rows, num_slices=2)
    print(f"data points of each rank: {list(f.counts)}")
    synk.close()
    print("demo 5: all results agree with those of one process")


if __name__ == "__main__":
    main()
