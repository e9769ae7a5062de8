"""Ops that fail on request: they raise, sleep, exit, kill their process, or cannot be unpickled."""

import os
import signal
import time

from backend import theano

#: Faults: the values of the second input of `Fault`.
NOTHING, RAISE, SLEEP, KILL, SEGFAULT, EXIT, LEAVE, LONG_SLEEP, RAISE_LATE, SLEEP_THREE, SHRINK = range(11)


class Fault(theano.Op):
    """The identity, with a scalar input that chooses a fault. A shared variable as that input fails on one rank."""

    __props__ = ()

    def make_node(self, x, fault):
        return theano.Apply(self, [x, theano.tensor.as_tensor_variable(fault)], [x.type()])

    def perform(self, node, inputs, outputs):
        x, fault = inputs
        if fault in (RAISE, RAISE_LATE):
            time.sleep(0.2 * (fault == RAISE_LATE))
            raise ZeroDivisionError(f"the fault that the test ordered, fault {int(fault)}")
        if fault in (SLEEP, LONG_SLEEP, SLEEP_THREE):
            time.sleep({SLEEP: 1.0, LONG_SLEEP: 20.0, SLEEP_THREE: 3.0}[int(fault)])
        elif fault in (KILL, SEGFAULT):
            os.kill(os.getpid(), signal.SIGKILL if fault == KILL else signal.SIGSEGV)
        elif fault == EXIT:
            raise SystemExit(3)
        elif fault == LEAVE:
            os._exit(4)
        outputs[0][0] = x[1:].copy() if fault == SHRINK else x.copy()

    def infer_shape(self, node, shapes):
        return [shapes[0]]

    def grad(self, inputs, gradients):
        return [gradients[0], theano.gradient.disconnected_type()]


class Copy(theano.Op):
    """A copy of its input."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0].copy()


#: What `Event` has recorded in this process.
events = []


class Event(Copy):
    """A copy that records when it, and the copy of its gradient, are computed: "forward 3", and 3."""

    __props__ = ("number", "what")

    def __init__(self, number, what=None):
        self.number, self.what = number, what or f"forward {number}"

    def perform(self, node, inputs, outputs):
        events.append(self.what)
        super().perform(node, inputs, outputs)

    def grad(self, inputs, gradients):
        return [Event(self.number, self.number)(gradients[0])]


class Unloadable(Copy):
    """An op that can be pickled, but not unpickled while a file exists."""

    __props__ = ("file",)

    def __init__(self, file):
        self.file = file

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.path.exists(self.file):
            raise LookupError("cannot be unpickled here")


class Slow(Unloadable):
    """An op that takes half a second to unpickle, except in the process that created it."""

    __props__ = ("pid", "file")

    def __init__(self, pid):
        super().__init__("")
        self.pid = pid

    def __setstate__(self, state):
        super().__setstate__(state)
        time.sleep(0.5 * (os.getpid() != self.pid))


class Hog(Copy):
    """An op that computes for long without releasing the GIL, as Theano's C code does."""

    __props__ = ("pid",)

    def __init__(self, pid):
        self.pid = pid

    def perform(self, node, inputs, outputs):
        if os.getpid() != self.pid:
            pow(3, 60_000_000)
        super().perform(node, inputs, outputs)
