"""Hessian-vector products on all ranks: Newton's method with conjugate gradients, which never forms the Hessian.

The product of the Hessian of a mean with a vector is the mean of the products, so that each rank computes that of its
own rows (Pearlmutter, 1994). Hessian-free optimisation and natural gradients (TRPO) are built of it.
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


def build(x, t, w, v):
    """Give the expressions of the loss, its gradient, and the product of its Hessian with `v`."""
    loss = T.log1p(T.exp(x.dot(w))).mean() - (t * x.dot(w)).mean() + 0.01 * T.sqr(w).sum()
    gradient = T.grad(loss, w)
    return [loss, gradient], T.grad((gradient * v).sum(), w, consider_constant=[v])


def solve(multiply, b, steps):
    """Solve ``A x = b`` by conjugate gradients, where ``multiply(x)`` is ``A x`` (Hestenes and Stiefel, 1952)."""
    x, r = np.zeros_like(b), b.copy()
    p, square = r.copy(), r.dot(r)
    for _ in range(steps):
        if square < 1e-20:
            break
        product = multiply(p)
        length = square / p.dot(product)
        x, r = x + length * p, r - length * product
        p, square = r + r.dot(r) / square * p, r.dot(r)
    return x


def newton(evaluate, multiply, w, steps=6):
    """Minimise; returns the losses, and the last point."""
    losses = []
    for _ in range(steps):
        loss, gradient = evaluate(w)
        losses.append(float(loss))
        w = w - solve(lambda v, point=w: multiply(point, v), gradient, 20)
    return losses, w


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one for each device)")
    parser.add_argument("--rows", type=int, default=10_001)
    arguments = parser.parse_args(argv)
    ranks = synk.fork(arguments.ranks)
    print(f"{ranks} rank(s)")

    rng = np.random.RandomState(0)
    rows = rng.randn(arguments.rows, 20)
    targets = (rows.dot(rng.randn(20)) + rng.randn(arguments.rows) > 0).astype("float64")
    data = [synk.data(rows), synk.data(targets)]

    x, t, w, v = T.dmatrix("x"), T.dvector("t"), T.dvector("w"), T.dvector("v")
    values, product = build(x, t, w, v)
    f = synk.function([x, t], values, bcast_inputs=[w])
    hessian = synk.function([x, t], product, bcast_inputs=[w, v])
    f_alone, hessian_alone = theano.function([x, t, w], values), theano.function([x, t, w, v], product)

    begin = np.zeros(20)
    losses, found = newton(lambda w: f(*data, w), lambda w, v: hessian(*data, w, v), begin)
    expected, alone = newton(
        lambda w: f_alone(rows, targets, w), lambda w, v: hessian_alone(rows, targets, w, v), begin
    )
    for step, loss in enumerate(losses):
        print(f"step {step}: loss {loss:.10f}")
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    np.testing.assert_allclose(found, alone, rtol=1e-6)
    synk.close()
    print("Hessian-vector products: all results agree with a serial run")


if __name__ == "__main__":
    main()
