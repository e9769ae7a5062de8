"""Demo 6: exact functions: run a serial program on all ranks by adding one line.

The program contains nothing about ranks. It normalises over the minibatch, masks its loss, clips by the norm of all
gradients and draws random numbers. Averaging the ranks' results would be wrong for each of these. The program runs with
and without `parallelize`, and the results are compared.
"""

import argparse

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk


def program():
    """Build a serial program; return its training function, its prediction function and its shared variables."""
    rng = np.random.RandomState(1)
    x, y, mask, rate = T.dmatrix("x"), T.ivector("y"), T.dvector("mask"), T.dscalar("rate")
    w, v = (theano.shared(rng.randn(*shape) * 0.5, name) for name, shape in (("w", (6, 16)), ("v", (16, 3))))
    mean = theano.shared(np.zeros(16), "mean")

    def scores(h):
        return T.nnet.softmax(T.tanh(h).dot(v))

    h = x.dot(w)
    kept = MRG_RandomStreams(5).binomial(h.shape, p=0.8, dtype="float64")
    out = scores((h - h.mean(axis=0)) / (h.std(axis=0) + 0.1) * kept)
    loss = (mask * T.nnet.categorical_crossentropy(out, y)).sum() / mask.sum()
    gradients = T.grad(loss, [w, v])
    norm = T.sqrt(sum((gradient**2).sum() for gradient in gradients))
    updates = [(p, p - rate * T.minimum(1, 1 / norm) * gradient) for p, gradient in zip((w, v), gradients)]
    updates.append((mean, 0.9 * mean + 0.1 * h.mean(axis=0)))
    train = theano.function([x, y, mask, theano.In(rate, value=0.5)], [loss, norm], updates=updates)
    predict = theano.function([x], scores(x.dot(w) - mean))
    return train, predict, [w, v, mean]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one for each device)")
    ranks = synk.fork(parser.parse_args(argv).ranks)
    print(f"{ranks} rank(s)")

    with synk.parallelize():
        train, predict, learnt = program()
    train_alone, predict_alone, learnt_alone = program()
    print("what the ranks exchange in a step:")
    print(train.partition)

    rng = np.random.RandomState(0)
    for step in range(10):
        n = 10 * ranks + step
        x, mask = rng.randn(n, 6), (np.arange(n) > n // 2) * 1.0  # on some ranks, all rows are masked
        y = (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0).astype("int32")
        losses, expected = train(x, y, mask), train_alone(x, y, mask)
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        print(f"step {step}: {n} rows, loss {losses[0]:.6f}, norm of the gradients {losses[1]:.6f}")
    for one, other in zip(learnt, learnt_alone):
        np.testing.assert_allclose(one.get_value(), other.get_value(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(predict(x), predict_alone(x), rtol=1e-9)

    learnt[0].set_value(learnt[0].get_value() / 2)  # takes effect on all ranks at the next call
    learnt_alone[0].set_value(learnt_alone[0].get_value() / 2)
    np.testing.assert_allclose(predict(x), predict_alone(x), rtol=1e-9)
    print(f"replicas that differ: {synk.check_replicas(learnt)}")
    synk.close()
    print("demo 6: all results agree with Theano")


if __name__ == "__main__":
    main()
