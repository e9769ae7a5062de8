"""Appendix A of the paper: its Theano program (Figure 4) and its Synkhronos program (Figure 5) agree.

With plain SGD, the average of the ranks' parameters after a step equals a step with the average of their gradients. On
equal shares this is the serial step, up to rounding.
"""

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import theano_only
from theano.tensor.signal import pool

import synkhronos as synk

pytestmark = theano_only("convolution and pooling")

NUM_EPOCHS = 4
CLASSES = 5


def build_cnn():
    """Build a small convolutional network with the same parameters each time."""
    rng = np.random.RandomState(1)

    def weights(name, *shape):
        scale = np.sqrt(2.0 / np.prod(shape[1:]))
        return theano.shared((scale * rng.randn(*shape)).astype(theano.config.floatX), name)

    input_var = T.tensor4("X")
    filters, filter_biases = weights("filters", 4, 1, 3, 3), weights("filter_biases", 4)
    dense, biases = weights("dense", 4 * 3 * 3, CLASSES), weights("biases", CLASSES)
    convolved = T.nnet.conv2d(input_var, filters) + filter_biases.dimshuffle("x", 0, "x", "x")
    pooled = pool.pool_2d(T.nnet.relu(convolved), (2, 2), ignore_border=True)
    network = T.nnet.softmax(T.dot(pooled.flatten(2), dense) + biases)
    return network, input_var, [filters, filter_biases, dense, biases]


def setup_training(network, param_vars, learning_rate=0.5):
    """Return the updates of plain SGD on the mean cross-entropy, the targets and the loss."""
    target_var = T.ivector("y")
    loss = T.nnet.categorical_crossentropy(network, target_var).mean()
    gradients = T.grad(loss, param_vars)
    rate = np.asarray(learning_rate, theano.config.floatX)
    return [(param, param - rate * gradient) for param, gradient in zip(param_vars, gradients)], target_var, loss


def load_dataset(n=600):
    """Return images of 8×8 pixels whose class is the position of a bright blob, and their classes."""
    rng = np.random.RandomState(2)
    y = rng.randint(0, CLASSES, n).astype("int32")
    X = 0.2 * rng.randn(n, 1, 8, 8)
    for image, label in zip(X[:, 0], y):
        image[label : label + 3, 2:5] += 1.5
    return X.astype(theano.config.floatX), y


def iter_minibatch_idxs(n, size, shuffle, seed=3):
    order = np.arange(n)
    if shuffle:
        np.random.RandomState(seed).shuffle(order)
    for start in range(0, n, size):
        yield order[start : start + size]


def train_theano():
    """Train as in Figure 4."""
    network, input_var, param_vars = build_cnn()
    updates, target_var, _ = setup_training(network, param_vars)
    train_fn = theano.function(inputs=[input_var, target_var], updates=updates)
    X_train, y_train = load_dataset()
    for epoch in range(NUM_EPOCHS):
        for batch_idxs in iter_minibatch_idxs(len(X_train), size=120, shuffle=True, seed=epoch):
            train_fn(X_train[batch_idxs], y_train[batch_idxs])
    return [var.get_value() for var in param_vars]


def train_synkhronos():
    """Train as in Figure 5, after ``synk.fork()``."""
    network, input_var, param_vars = build_cnn()
    updates, target_var, loss = setup_training(network, param_vars)
    train_fn = synk.function(inputs=[input_var, target_var], updates=updates)
    test_fn = synk.function([input_var, target_var], [loss, T.eq(network.argmax(axis=1), target_var).mean()])
    synk.distribute()
    X_train, y_train = load_dataset()
    X_train, y_train = (synk.data(X_train), synk.data(y_train))
    for epoch in range(NUM_EPOCHS):
        for batch_idxs in iter_minibatch_idxs(len(X_train), size=120, shuffle=True, seed=epoch):
            train_fn(X_train, y_train, batch=batch_idxs)
            synk.all_reduce(param_vars, op="avg")
    return param_vars, test_fn(X_train, y_train)


@pytest.fixture(scope="module")
def serial():
    return train_theano()


def test_appendix_a(session, serial):
    param_vars, (loss, accuracy) = train_synkhronos()
    for var, expected in zip(param_vars, serial):
        on_ranks = synk.gather(var)
        for values in on_ranks:
            np.testing.assert_array_equal(values, on_ranks[0])
        np.testing.assert_allclose(on_ranks[0], expected, rtol=1e-4, atol=1e-5)
    assert loss < np.log(CLASSES)
    assert accuracy > 0.4  # better than chance
