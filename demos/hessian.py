"""Newton's method with Hessian-vector products that all ranks compute.

Conjugate gradients compute the steps from Hessian-vector products (Pearlmutter, 1994), without forming the Hessian. The
Hessian of a mean over rows is the mean of the rows' Hessians, so each rank computes the product for its shard.
Hessian-free optimisation and natural gradients (TRPO) use the same products.
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
    """Return the expressions ``[loss, gradient]``, and the product of the Hessian with `v`."""
    loss = T.log1p(T.exp(x.dot(w))).mean() - (t * x.dot(w)).mean() + 0.01 * T.sqr(w).sum()
    gradient = T.grad(loss, w)
    return [loss, gradient], T.grad((gradient * v).sum(), w, consider_constant=[v])


def solve(multiply, b, steps):
    """Solve ``A x = b`` by conjugate gradients, given ``multiply(x) = A x`` (Hestenes and Stiefel, 1952)."""
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
    """Minimise by Newton's method; return the losses and the last point."""
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
