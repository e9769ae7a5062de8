"""Train on MNIST on all ranks, with the data in shared memory and index lists as minibatches.

The training set is copied to shared memory once. A step sends only indices, and each rank copies its own shard of the
minibatch. Without dropout, each step equals that of the plain Theano script, and so do the losses, up to rounding.

With ``--rule``, each rank makes steps with its share of the batch size by itself, in one loop, and a training rule
combines the parameters (docs/howto/local_training.md).
"""

import sys
from functools import partial
from pathlib import Path

import synkhronos as synk

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a script

from demos.lasagne_mnist.cli import make_parser, parse_arguments, training_rule
from demos.lasagne_mnist.data import load
from demos.lasagne_mnist.models import build
from demos.lasagne_mnist.resume import Checkpoints
from demos.lasagne_mnist.training import minibatches, run, run_with_rule, slices_for
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument(
        "--rule", type=training_rule, help="a training rule and its settings, such as localsgd:every=8 (none)"
    )
    args = parse_arguments(parser, argv)
    if args.rule and (args.resume or args.checkpoint):
        parser.error("--rule has no checkpoints: leave out --checkpoint and --resume")
    sets = load(args.data)
    ranks = synk.fork(args.ranks)
    graph = build(args.model, args.dropout, args.seed)

    rule, name = getattr(updates, args.update_rule), "train_mnist_cpu_data"
    train = make_train_function(graph.loss, graph.params, graph.x, graph.y, rule, args.learning_rate, rule=args.rule)
    if args.rule:
        # In the loop, ranks have parameters of their own, so the test takes the values of all parameters as inputs.
        values = [param.type() for param in graph.params]
        tested, replaced = [graph.test_loss, graph.test_accuracy], list(zip(graph.params, values))
        test = synk.function([graph.x, graph.y], tested, bcast_inputs=values, givens=replaced)
        synk.distribute()
        return run_with_rule(
            args,
            name,
            ranks,
            sets,
            loop=partial(train.loop, synk.data(sets.x_train), synk.data(sets.y_train)),
            evaluate=lambda x, y, params: test(x, y, *params, num_slices=slices_for(len(y), ranks)),
            params=graph.params,
        )

    test = synk.function([graph.x, graph.y], [graph.test_loss, graph.test_accuracy])
    checkpoints = Checkpoints(args, name, sets.source, [train.gradient, train.update])
    synk.distribute()
    x_train, y_train = synk.data(sets.x_train), synk.data(sets.y_train)

    return run(
        args,
        name,
        ranks,
        sets,
        draw=lambda rng: minibatches(len(y_train), args.batch_size, rng),
        step=lambda batch: train(x_train, y_train, batch=batch),
        evaluate=lambda x, y: test(x, y, num_slices=slices_for(len(y), ranks)),
        params=graph.params,
        checkpoints=checkpoints,
    )


if __name__ == "__main__":
    main()
