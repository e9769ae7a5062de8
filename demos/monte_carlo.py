"""Monte Carlo price of an Asian option, with an independent random stream on each rank.

Each row is a path, and the estimate is the mean over all paths. It is compared with a serial run in two ways:

- `random="serial"`, the default: all draws are the serial program's, and the results agree up to rounding.
- `random="own"`: each rank draws for its own rows from its own stream, so that no path is simulated twice. The results
  agree within six standard errors.
"""

import argparse

import numpy as np

import synkhronos as synk

try:
    import theano
    import theano.tensor as T
    from theano.sandbox.rng_mrg import MRG_RandomStreams as Streams
except ImportError:  # Python 3.12 and later
    import pytensor as theano
    import pytensor.tensor as T
    from pytensor.tensor.random.utils import RandomStream as Streams

STEPS = 12
RATE, VOLATILITY, STRIKE = 0.02, 0.3, 1.0


def build(function, **options):
    """Build a function that returns the mean pay-off and its mean square for starting prices, one for each path."""
    start = T.dvector("start")
    uniform = Streams(1).uniform(size=(start.shape[0], STEPS), dtype="float64", low=1e-12)
    normal = T.sqrt(2) * T.erfinv(2 * uniform - 1)
    growth = (RATE - VOLATILITY**2 / 2) / STEPS + VOLATILITY / np.sqrt(STEPS) * normal
    path = start.dimshuffle(0, "x") * T.exp(T.cumsum(growth, axis=1))
    payoff = np.exp(-RATE) * T.maximum(path.mean(axis=1) - STRIKE, 0)
    return function([start], [payoff.mean(), T.sqr(payoff).mean()], **options)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one for each device)")
    parser.add_argument("--paths", type=int, default=20_001)
    arguments = parser.parse_args(argv)
    ranks = synk.fork(arguments.ranks)
    print(f"{ranks} rank(s)")

    start = np.ones(arguments.paths)
    expected, square = build(theano.function)(start)
    error = np.sqrt((square - expected**2) / arguments.paths)
    print(f"a serial run: {expected:.6f}, standard error {error:.6f}")

    same = build(synk.function, exact=True)(start)
    np.testing.assert_allclose(same, [expected, square], rtol=1e-9)
    print(f"the same draws, on all ranks: {same[0]:.6f}")

    own = build(synk.function, exact=True, random="own")
    estimates = [float(own(start)[0]) for _ in range(4)]
    print(f"draws from each rank's own stream: {', '.join(f'{estimate:.6f}' for estimate in estimates)}")
    np.testing.assert_allclose(estimates, expected, atol=6 * error)
    assert len(set(estimates)) == 4, "two calls drew the same numbers"
    synk.close()
    print("Monte Carlo: all results agree with a serial run")


if __name__ == "__main__":
    main()
