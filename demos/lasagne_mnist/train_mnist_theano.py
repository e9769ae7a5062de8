"""Train on MNIST in one process with plain Theano: what the other two scripts are compared with."""

import sys
from pathlib import Path

import theano

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a script

from demos.lasagne_mnist.cli import make_parser, parse_arguments
from demos.lasagne_mnist.data import load
from demos.lasagne_mnist.models import build
from demos.lasagne_mnist.training import evaluate_in_pieces, minibatches, run
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function_theano


def main(argv=None):
    args = parse_arguments(make_parser(__doc__, ranks=False), argv)
    sets = load(args.data)
    graph = build(args.model, args.dropout, args.seed)

    rule = getattr(updates, args.update_rule)
    train = make_train_function_theano(graph.loss, graph.params, graph.x, graph.y, rule, args.learning_rate)
    test = theano.function([graph.x, graph.y], [graph.test_loss, graph.test_accuracy])

    return run(
        args,
        "train_mnist_theano",
        1,
        sets,
        draw=lambda rng: minibatches(len(sets.y_train), args.batch_size, rng),
        step=lambda batch: train(sets.x_train, sets.y_train, batch=batch),
        evaluate=lambda x, y: evaluate_in_pieces(test, x, y),
    )


if __name__ == "__main__":
    main()
