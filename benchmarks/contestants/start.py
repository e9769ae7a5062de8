"""Start-up, measured once in each process: from the end of imports to functions that are on all ranks."""

import pickle
import sys
import threading
import time

import synkhronos as synk
from benchmarks.contestants._batches import LEARNING_RATE, MOMENTUM
from benchmarks.contestants._networks import build_network, describe
from benchmarks.contestants._serve import compete
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function


def make(model, ranks, unpickle):
    """Fork, build the functions of a training script, and distribute them; if `unpickle`, also unpickle them here."""
    seconds = {}

    def clock(part, call, *arguments):
        start = time.perf_counter()
        result = call(*arguments)
        seconds[part] = time.perf_counter() - start
        return result

    def build():
        graph = build_network(model)
        rule = updates.nesterov_momentum
        train = make_train_function(graph.loss, graph.params, graph.x, graph.y, rule, LEARNING_RATE, MOMENTUM)
        test = synk.function([graph.x, graph.y], [graph.test_loss, graph.test_accuracy])
        return graph, [train.gradient, train.update, test]

    clock("fork", synk.fork, ranks)
    graph, functions = clock("build", build)
    clock("distribute", synk.distribute)
    if unpickle:
        plain = [function._theano for function in functions]
        with_deep_stack(lambda: clock("unpickle", pickle.loads, pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)))

    def run(part):
        return [seconds[part]]

    return run, describe(graph)


def with_deep_stack(call):
    """Run ``call()`` in a thread with a large stack, because pickling a graph recurses from node to node."""
    before = threading.stack_size(512 * 2**20), sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before[0])
        sys.setrecursionlimit(before[1])


if __name__ == "__main__":
    compete(make)
