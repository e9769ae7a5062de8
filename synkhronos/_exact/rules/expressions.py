"""Operations that Theano itself computes as expressions on a CPU: these are divided in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


RULES: dict[type, Rule] = {
    bn.AbstractBatchNormTrain: _expressed(bn.local_abstract_batch_norm_train),
    bn.AbstractBatchNormTrainGrad: _expressed(bn.local_abstract_batch_norm_train_grad),
    bn.AbstractBatchNormInference: _expressed(bn.local_abstract_batch_norm_inference),
}
