"""The ResNet demo: layers compared with NumPy, networks, steps compared with plain Theano, and 50 layers on ranks."""

import functools
import json
import pickle
import sys

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import theano_only
from comparison import assert_close
from lasagne.layers import InputLayer
from scripts import ROOT
from test_demos import run_demo

import synkhronos as synk

sys.path.append(str(ROOT))

from demos.resnet import data, models, train_resnet, train_resnet_theano, training
from demos.resnet.cli import make_parser, parse_arguments
from demos.resnet.layers import BatchNormLayer, PaddedConv2DLayer

pytestmark = theano_only("Lasagne")


@pytest.fixture(autouse=True)
def settings_restored(monkeypatch):
    """Set floatX to float64, and restore Theano's and Python's settings after the test."""
    before, limit = theano.config.floatX, sys.getrecursionlimit()
    theano.config.floatX = "float64"
    yield
    theano.config.floatX = before
    sys.setrecursionlimit(limit)


# The layers.


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2, 6)])
def test_batch_normalisation(shape):
    rng = np.random.RandomState(0)
    x = T.TensorType("float64", [False] * len(shape))("x")
    layer = BatchNormLayer(InputLayer((None, *shape[1:]), x), epsilon=0.01, alpha=0.3)
    gamma, beta, mean, inv_std = start = rng.rand(4, 3) + 0.5
    for var, value in zip((layer.gamma, layer.beta, layer.mean, layer.inv_std), start):
        var.set_value(value)
    training = theano.function([x], lasagne.layers.get_output(layer), updates=layer.running_updates)
    test = theano.function([x], lasagne.layers.get_output(layer, deterministic=True))

    for values in 3 * rng.randn(3, *shape) + 1:
        rows = np.moveaxis(values, 1, -1).reshape(-1, 3)  # a column for each channel

        def expected(mean, inv_std, rows=rows, values=values):
            normal = gamma * (rows - mean) * inv_std + beta
            return np.moveaxis(normal.reshape(*np.moveaxis(values, 1, -1).shape), -1, 1)

        assert_close(test(values), expected(mean, inv_std), rtol=1e-12)
        batch_inv_std = 1 / np.sqrt(rows.var(axis=0) + 0.01)
        assert_close(training(values), expected(rows.mean(axis=0), batch_inv_std), rtol=1e-12)
        mean = 0.7 * mean + 0.3 * rows.mean(axis=0)
        inv_std = 0.7 * inv_std + 0.3 * batch_inv_std
        assert_close(layer.mean.get_value(), mean, rtol=1e-12)
        assert_close(layer.inv_std.get_value(), inv_std, rtol=1e-12)


def test_gradient_of_batch_normalisation():
    layer = BatchNormLayer((None, 3, 2, 2))
    layer.gamma, layer.beta = T.dvectors("gamma", "beta")
    rng = np.random.RandomState(0)

    def normalise(x, gamma, beta):
        layer.gamma, layer.beta = gamma, beta
        return layer.get_output_for(x)

    points = [rng.randn(4, 3, 2, 2), rng.rand(3), rng.rand(3)]
    theano.gradient.verify_grad(normalise, points, rng=rng, mode="FAST_COMPILE")


def test_only_training_changes_the_running_averages():
    layer = BatchNormLayer((None, 3))
    assert lasagne.layers.get_all_params(layer, trainable=True) == [layer.beta, layer.gamma]
    assert lasagne.layers.get_all_params(layer, trainable=False) == [layer.mean, layer.inv_std]
    layer.get_output_for(T.dmatrix(), deterministic=True)
    assert layer.running_updates == []
    layer.get_output_for(T.dmatrix())
    assert [var for var, _ in layer.running_updates] == [layer.mean, layer.inv_std]


@pytest.mark.filterwarnings("ignore:The `image_shape` keyword")
@pytest.mark.parametrize("size, stride", [(1, 2), (3, 1), (7, 2)])
def test_padded_convolution_is_lasagnes(size, stride):
    incoming = InputLayer((None, 3, 9, 9))
    options = {"num_filters": 4, "filter_size": size, "stride": stride, "pad": size // 2}
    layer = PaddedConv2DLayer(incoming, b=lasagne.init.Normal(1), **options)
    other = lasagne.layers.Conv2DLayer(incoming, W=layer.W, b=layer.b, **options)
    x = incoming.input_var
    f = theano.function([x], [layer.get_output_for(x), lasagne.layers.get_output(other)])
    ours, lasagnes = f(np.random.RandomState(0).randn(2, 3, 9, 9))
    assert_close(ours, lasagnes)
    assert ours.shape[1:] == layer.output_shape[1:]


# The networks.


def test_full_resnet_50():
    theano.config.floatX = "float32"
    network = models.build_network(T.tensor4(), 50, 224, 1000, 64)
    shapes = {layer.name: layer.output_shape for layer in lasagne.layers.get_all_layers(network) if layer.name}
    sizes = {1: 56, 2: 28, 3: 14, 4: 7}
    assert shapes == {f"stage{n}": (None, 128 * 2**n, size, size) for n, size in sizes.items()}
    assert network.output_shape == (None, 1000)
    assert lasagne.layers.count_params(network, trainable=True) == 25_557_032  # with the last layer's 1,000 biases
    assert lasagne.layers.count_params(network, trainable=False) == 2 * 26_560  # mean and deviation by channel


@pytest.mark.parametrize("depth", models.BLOCKS)
def test_depths(depth):
    blocks = models.BLOCKS[depth]
    network = models.build_network(T.tensor4(), depth, 17, 5, 1)
    layers = lasagne.layers.get_all_layers(network)
    convolutions = sum(isinstance(layer, PaddedConv2DLayer) for layer in layers)
    assert convolutions == 1 + 3 * sum(blocks) + len(blocks)  # each stage has one that changes the shape
    assert depth == 3 * sum(blocks) + 2
    assert network.output_shape == (None, 5)


# The data and the loop.


@pytest.mark.parametrize("size", [3, 32])
def test_images_show_their_class(size):
    def make(seed, which, n=400):
        images, labels = np.empty((n, 3, size, size), "float32"), np.empty(n, "int32")
        data.fill(images, labels, 4, seed, which)
        return images, labels

    images, labels = make(0, data.TRAINING)
    assert set(labels) == set(range(4))
    again, others = make(0, data.TRAINING), make(0, data.VALIDATION)
    assert np.array_equal(images, again[0]) and np.array_equal(labels, again[1])
    assert not np.array_equal(images, others[0]) and not np.array_equal(images, make(1, data.TRAINING)[0])
    # the mean images of the classes of one set predict the classes of the other set
    means = np.stack([images[labels == label].mean(axis=0) for label in range(4)])
    distances = ((others[0][:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert np.mean(distances.argmin(axis=1) == others[1]) > 0.8


def test_minibatches():
    for shuffle in (False, True):
        batches = list(training.minibatches(10, 4, np.random.RandomState(0), shuffle))
        rows = [list(range(10)[batch]) if isinstance(batch, slice) else list(batch) for batch in batches]
        assert [len(some) for some in rows] == [4, 4, 2]
        every = [row for some in rows for row in some]
        assert (every == list(range(10))) != shuffle and sorted(every) == list(range(10))


@pytest.mark.parametrize(
    "options, steps", [("", [3, 3, 3]), ("--steps 3", [3]), ("--steps 5", [3, 2]), ("--steps 99", [3, 3, 3])]
)
def test_steps_of_epochs(options, steps):
    args = parse_arguments(make_parser("A test."), ["--n-images", "10", *options.split()])
    assert training.steps_of_epochs(args, 4) == steps


def test_training_without_progress_is_an_error():
    training.check_losses([[3.0, 1.0], [2.0, 1.5]])
    training.check_losses([[1.0, 3.0]])
    with pytest.raises(SystemExit, match="not below that of the first"):
        training.check_losses([[3.0, 1.0], [2.0, 2.0]])
    with pytest.raises(SystemExit, match="not a finite number"):
        training.check_losses([[3.0, np.nan], [2.0]])


def test_ranks_that_differ_are_detected(synchronize):
    synchronize(2)
    some = [theano.shared(np.ones(3)), theano.shared(np.zeros((2, 2)))]
    synk.function([], [var.sum() for var in some])()
    assert train_resnet.equal_on_all_ranks(some, 2)
    synk.set_value(1, some[1], np.full((2, 2), 1e-300))
    assert not train_resnet.equal_on_all_ranks(some, 2)


# Training, compared with plain Theano step by step.

SMALL = ["--dtype=float64", "--depth=5", "--width=4", "--image-size=12", "--classes=3"]
SMALL += ["--n-images=24", "--n-validation=11"]


@functools.lru_cache(None)
def reference():
    """Return one rank's computation in plain Theano: the loss, gradients and running averages of ``x`` and ``y``."""
    args = parse_arguments(make_parser("A test."), SMALL)
    graph = models.build(args.depth, args.image_size, args.classes, args.width, args.seed)
    new = dict(graph.running_updates)
    outputs = [graph.loss, *theano.grad(graph.loss, graph.params), *(new[var] for var in graph.statistics)]
    compute = theano.function([graph.x, graph.y], outputs)
    test = theano.function([graph.x, graph.y], graph.test_loss)
    return args, graph, compute, test, [var.get_value() for var in graph.params + graph.statistics]


def follow(ranks, batch_size, shuffle=True, all_reduce=True):
    """Compute the expected losses of several ranks one after the other, with batch normalization on each share.

    Returns the losses of all steps, and those of the validations.
    """
    args, graph, compute, test, start = reference()
    values = [list(start) for _ in range(ranks)]  # parameters and running averages of each rank
    n_params, losses, validations = len(graph.params), [], []

    def call_on_shares(function, data, rows):
        shares, results = np.array_split(rows, ranks), []
        for share, of_rank in zip(shares, values):
            for var, value in zip(graph.params + graph.statistics, of_rank):
                var.set_value(value)
            results.append(function(*(array[share] for array in data)))
        return results, [len(share) for share in shares]

    training_set = train_resnet_theano.make_images(args, args.n_images, data.TRAINING)
    validation_set = train_resnet_theano.make_images(args, args.n_validation, data.VALIDATION)
    for epoch in range(args.epochs):
        order = np.random.RandomState([args.seed, epoch])
        for batch in training.minibatches(args.n_images, batch_size, order, shuffle):
            results, counts = call_on_shares(compute, training_set, np.arange(args.n_images)[batch])
            losses.append(np.average([loss for loss, *_ in results], weights=counts))
            for of_rank, (_, *new) in zip(values, results):
                for i, param in enumerate(of_rank[:n_params]):
                    mean = np.average([result[1 + i] for result in results], axis=0, weights=counts)
                    of_rank[i] = param - args.learning_rate * (mean if all_reduce else new[i])
                of_rank[n_params:] = new[n_params:]
        for i in range(n_params, len(start) if all_reduce else 0):
            mean = np.mean([of_rank[i] for of_rank in values], axis=0)
            for of_rank in values:
                of_rank[i] = mean
        results, counts = call_on_shares(test, validation_set, np.arange(args.n_validation))
        validations.append(np.average(results, weights=counts))
    return losses, validations


def check(report, expected):
    """Check the losses of every step and of every validation."""
    losses, validations = expected
    assert len(losses) > 5
    assert_close(np.concatenate([epoch["losses"] for epoch in report["epochs"]]), losses, rtol=1e-9)
    assert_close([epoch["valid_loss"] for epoch in report["epochs"]], validations, rtol=1e-9)


@pytest.mark.timeout(300)
def test_plain_theano():
    check(train_resnet_theano.main([*SMALL, "--batch-size", "10"]), follow(1, 10))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_follow_the_serial_computation(no_session, ranks):
    """Three ranks compute 4, 3 and 3 images in a step, and 2, 1 and 1 at the end of each epoch."""
    report = train_resnet.main([*SMALL, "--ranks", str(ranks), "--cpu", "--fixed-batch", "--batch-size", "10"])
    assert report["ranks"] == ranks and report["batch_size"] == 10
    check(report, follow(ranks, 10))


@pytest.mark.timeout(300)
def test_ranks_with_independent_networks(no_session):
    options = ["--ranks", "2", "--batch-size", "5", "--no-shuffle", "--no-all-reduce", "--num-slices", "3"]
    report = train_resnet.main([*SMALL, *options])
    assert report["batch_size"] == 10
    check(report, follow(2, 10, shuffle=False, all_reduce=False))


class AliasedBatchNormLayer(BatchNormLayer):
    """Batch normalization as in Lasagne 0.2: default updates of aliases change the running averages."""

    def get_output_for(self, input, deterministic=False, **kwargs):
        output = super().get_output_for(input, deterministic, **kwargs)
        for var, new in self.running_updates:
            alias = theano.clone(var, share_inputs=False)
            alias.default_update = theano.clone(new, {var: alias})
            output += 0 * alias.dimshuffle("x", 0, *["x"] * (input.ndim - 2))
        self.running_updates = ()
        return output


@pytest.mark.timeout(300)
def test_lasagnes_own_batch_normalisation(no_session, monkeypatch):
    expected = follow(3, 10)
    monkeypatch.setattr(models, "BatchNormLayer", AliasedBatchNormLayer)
    check(train_resnet.main([*SMALL, "--ranks", "3", "--fixed-batch", "--batch-size", "10"]), expected)


@pytest.mark.timeout(300)
def test_it_learns_as_a_module(tmp_path):
    options = ["--ranks", "2", "--n-images", "512", "--batch-size", "16", "--json", "report.json"]
    output = run_demo(["-m", "demos.resnet.train_resnet", *options], tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [len(epoch["losses"]) for epoch in report["epochs"]] == [16, 16, 16]
    assert report["epochs"][-1]["valid_accuracy"] > 0.5
    assert output.splitlines()[-1].startswith("validation accuracy: ")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_50_layers_on_two_ranks(synchronize):
    """The graph is as deep as the full network's, deeper than Python's recursion limit."""
    synchronize(2)
    limit = sys.getrecursionlimit()
    graph = models.build(50, 16, 3, 2)
    assert len(theano.grad(graph.loss, graph.params)) == len(graph.params)
    # without these two rewrites, Theano takes half as long
    mode = theano.compile.get_default_mode().excluding("fusion", "inplace_elemwise_optimizer")
    f = synk.function([graph.x, graph.y], graph.loss, updates=graph.running_updates, mode=mode)
    sys.setrecursionlimit(limit)
    with pytest.raises(RecursionError):
        pickle.dumps(graph.loss)
    synk.distribute()
    x, y = np.empty((7, 3, 16, 16)), np.empty(7, "int32")
    data.fill(x, y, 3, 0)
    loss = f(x, y)
    means = synk.gather(graph.statistics[-2])
    shares = []
    for rank, rows in enumerate([slice(4), slice(4, 7)]):
        graph.statistics[-2].set_value(np.zeros_like(means[0]))
        shares.append(f.as_theano(x[rows], y[rows]))
        assert_close(means[rank], graph.statistics[-2].get_value(), rtol=1e-9)
    assert_close(loss, np.average(shares, weights=[4, 3]), rtol=1e-9)
