"""k-means on all ranks, as an exact function.

A step of Lloyd's algorithm (1982) is one call. Each rank assigns its rows to the nearest centres, the sums and counts
of rows are added over the ranks, and an update moves the centres. The centres are compared with those of a serial run.
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


def build(function, centres, **options):
    """Return a step of Lloyd's algorithm and its centres; the step returns the mean squared distance before it."""
    x, c = T.dmatrix("x"), theano.shared(centres, "centres")
    distances = T.sqr(x).sum(axis=1, keepdims=True) - 2 * x.dot(c.T) + T.sqr(c).sum(axis=1)
    nearest = T.eq(distances.argmin(axis=1, keepdims=True), T.arange(len(centres)))
    numbers = nearest.sum(axis=0)
    moved = T.dot(T.cast(nearest, "float64").T, x) / T.maximum(numbers, 1).dimshuffle(0, "x")
    updates = [(c, T.switch(T.eq(numbers, 0).dimshuffle(0, "x"), c, moved))]
    return function([x], distances.min(axis=1).mean(), updates=updates, **options), c


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one for each device)")
    parser.add_argument("--rows", type=int, default=20_001)
    arguments = parser.parse_args(argv)
    ranks = synk.fork(arguments.ranks)
    print(f"{ranks} rank(s)")

    rng = np.random.RandomState(0)
    truth = 10 * rng.rand(5, 2)
    rows = truth[rng.randint(5, size=arguments.rows)] + 0.3 * rng.randn(arguments.rows, 2)
    begin = rows[:: len(rows) // 5][:5].copy()

    step, centres = build(synk.function, begin, exact=True)
    step_alone, centres_alone = build(theano.function, begin)
    data = synk.data(rows)
    for number in range(10):
        spread, expected = step(data), step_alone(rows)
        np.testing.assert_allclose(spread, expected, rtol=1e-9)
        print(f"step {number}: mean squared distance {spread:.6f}")
    np.testing.assert_allclose(centres.get_value(), centres_alone.get_value(), rtol=1e-9)
    synk.close()
    print("k-means: all results agree with a serial run")


if __name__ == "__main__":
    main()
