"""An Op that fails when told to: it raises, sleeps, exits, or kills its process."""

import os
import signal
import time

from backend import theano

#: What `Fault` does: the values of its second input.
NOTHING, RAISE, SLEEP, KILL, SEGFAULT, EXIT, LEAVE, LONG_SLEEP, RAISE_LATE = range(9)


class Fault(theano.Op):
    """The identity, but for a scalar that says what should go wrong; give it a shared variable to fail on one rank."""

    __props__ = ()

    def make_node(self, x, fault):
        return theano.Apply(self, [x, theano.tensor.as_tensor_variable(fault)], [x.type()])

    def perform(self, node, inputs, outputs):
        x, fault = inputs
        if fault in (RAISE, RAISE_LATE):
            time.sleep(0.2 * (fault == RAISE_LATE))
            raise ZeroDivisionError(f"the fault that the test ordered, fault {int(fault)}")
        if fault in (SLEEP, LONG_SLEEP):
            time.sleep(1.0 if fault == SLEEP else 20.0)
        elif fault in (KILL, SEGFAULT):
            os.kill(os.getpid(), signal.SIGKILL if fault == KILL else signal.SIGSEGV)
        elif fault == EXIT:
            raise SystemExit(3)
        elif fault == LEAVE:
            os._exit(4)
        outputs[0][0] = x.copy()

    def infer_shape(self, node, shapes):
        return [shapes[0]]

    def grad(self, inputs, gradients):
        return [gradients[0], theano.gradient.disconnected_type()]
