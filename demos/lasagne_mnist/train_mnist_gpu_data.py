"""Train on MNIST on all ranks, with the data scattered into shared variables on the devices.

The training set is scattered once, and each rank keeps its shard. A step selects rows of the shards with ``batch_s``,
so only indices and gradients are sent. Shards and minibatches may differ in length between ranks, because each rank's
gradient is weighted by its number of rows.
"""

import sys
from pathlib import Path

import numpy as np
import theano

import synkhronos as synk

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a script

from demos.lasagne_mnist.cli import make_parser, parse_arguments
from demos.lasagne_mnist.data import load
from demos.lasagne_mnist.models import build
from demos.lasagne_mnist.resume import Checkpoints
from demos.lasagne_mnist.training import rank_minibatches, run, slices_for
from synkhronos.extensions import updates


def main(argv=None):
    args = parse_arguments(make_parser(__doc__), argv)
    sets = load(args.data)
    ranks = synk.fork(args.ranks)
    graph = build(args.model, args.dropout, args.seed)

    # The steps of `synkhronos.extensions.train`, with data in shared variables instead of inputs.
    rule = getattr(updates, args.update_rule)
    grad_updates, param_updates, grad_shared = rule(graph.loss, graph.params, args.learning_rate)
    x_data = theano.shared(np.zeros((1, 1, 28, 28), graph.x.dtype), "x_data")
    y_data = theano.shared(np.zeros(1, graph.y.dtype), "y_data")
    gradient = synk.function(
        [],
        graph.loss,
        updates=grad_updates,
        givens=[(graph.x, x_data), (graph.y, y_data)],
        sliceable_shareds=[x_data, y_data],
    )
    update = synk.function([], updates=param_updates)
    test = synk.function([graph.x, graph.y], [graph.test_loss, graph.test_accuracy])
    checkpoints = Checkpoints(args, "train_mnist_gpu_data", sets.source, [gradient, update], [x_data, y_data])
    synk.distribute()
    synk.scatter([x_data, y_data], [sets.x_train, sets.y_train])
    lengths = synk.get_lengths(y_data)

    def step(batch):
        loss = gradient(batch_s=batch)
        synk.all_reduce(grad_shared, weights=gradient.counts)
        update()
        return loss

    return run(
        args,
        "train_mnist_gpu_data",
        ranks,
        sets,
        draw=lambda rng: rank_minibatches(lengths, args.batch_size, rng),
        step=step,
        evaluate=lambda x, y: test(x, y, num_slices=slices_for(len(y), ranks)),
        params=graph.params,
        checkpoints=checkpoints,
    )


if __name__ == "__main__":
    main()
