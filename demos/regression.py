"""Logistic regression with SciPy's L-BFGS; all ranks compute the loss and the gradient.

SciPy chooses the steps and requests the loss and its gradient at each point. The rows are scattered, and the point is a
broadcast input. The result is compared with that of a serial run.
"""

import argparse

import numpy as np
from scipy.optimize import minimize

import synkhronos as synk

try:
    import theano
    import theano.tensor as T
except ImportError:  # Python 3.12 and later
    import pytensor as theano
    import pytensor.tensor as T


def loss_and_gradient(w, x, t):
    """Return the expressions of the penalised log loss and of its gradient."""
    loss = T.log1p(T.exp(x.dot(w))).mean() - (t * x.dot(w)).mean() + 0.001 * T.sqr(w).sum()
    return [loss, T.grad(loss, w)]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one for each device)")
    parser.add_argument("--rows", type=int, default=20_001)
    parser.add_argument("--columns", type=int, default=50)
    arguments = parser.parse_args(argv)
    ranks = synk.fork(arguments.ranks)
    print(f"{ranks} rank(s)")

    rng = np.random.RandomState(0)
    data = synk.data(rng.randn(arguments.rows, arguments.columns))
    rows, truth = np.asarray(data), rng.randn(arguments.columns)
    targets = (rows.dot(truth) + rng.randn(arguments.rows) > 0).astype("float64")
    targets_data = synk.data(targets)

    x, t, w = T.dmatrix("x"), T.dvector("t"), T.dvector("w")
    f = synk.function([x, t], loss_and_gradient(w, x, t), bcast_inputs=[w])  # both are means: use the default op, "avg"
    f_alone = theano.function([x, t, w], loss_and_gradient(w, x, t))

    options = {"jac": True, "method": "L-BFGS-B", "options": {"gtol": 1e-8, "ftol": 1e-14}}
    found = minimize(lambda point: f(data, targets_data, point), np.zeros(arguments.columns), **options)
    alone = minimize(lambda point: f_alone(rows, targets, point), np.zeros(arguments.columns), **options)
    print(f"{found.nit} steps, {found.nfev} evaluations: loss {found.fun:.8f}; a serial run: {alone.fun:.8f}")
    np.testing.assert_allclose(found.fun, alone.fun, rtol=1e-9)
    np.testing.assert_allclose(found.x, alone.x, rtol=1e-4, atol=1e-5)
    synk.close()
    print("regression: all results agree with a serial run")


if __name__ == "__main__":
    main()
