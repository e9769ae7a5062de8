"""Operations that are computed as expressions, which are divided in their place: inner graphs, and some of Theano's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from theano.compile.builders import OpFromGraph
from theano.gof.graph import clone_get_equiv
from theano.tensor.nnet import bn

from synkhronos._exact.placements import Placed
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]


def _expressed(optimizer: Any) -> Rule:
    """The rule of an Op that a local optimizer of Theano's takes apart."""

    def rule(walk: Walk, node: Any) -> str | Sequence[Placed]:
        expressions = optimizer.transform(node)
        if not expressions or any(one.type != output.type for one, output in zip(expressions, node.outputs)):
            return "Theano has no expression for it"
        walk.run(expressions)
        return [Placed(walk.new(one), walk.placement(one)) for one in expressions]

    return rule


def _inner_graph(walk: Walk, node: Any) -> Sequence[Placed]:
    """The inner graph of an OpFromGraph, whose gradients the program has taken by now."""
    op = node.op
    given = {inner: inner.type.filter_variable(outer) for inner, outer in zip(op.local_inputs, node.inputs)}
    clones = clone_get_equiv(op.local_inputs, op.local_outputs, copy_inputs=False, copy_orphans=False, memo=given)
    expressions = [clones[output] for output in op.local_outputs]
    walk.run(expressions)
    return [Placed(walk.new(one), walk.placement(one)) for one in expressions]


RULES: dict[type, Rule] = {
    OpFromGraph: _inner_graph,
    bn.AbstractBatchNormTrain: _expressed(bn.local_abstract_batch_norm_train),
    bn.AbstractBatchNormTrainGrad: _expressed(bn.local_abstract_batch_norm_train_grad),
    bn.AbstractBatchNormInference: _expressed(bn.local_abstract_batch_norm_inference),
}
