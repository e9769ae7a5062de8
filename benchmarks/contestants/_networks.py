"""Networks of the demos by name, for contestants that use Theano."""

from typing import Any

from benchmarks.contestants._batches import SHAPES
from benchmarks.contestants._kernels import of_theano
from demos.lasagne_mnist.models import build


def build_network(model: str) -> Any:
    """Build ``"cnn"``, ``"mlp"`` or ``"resnet"`` with its loss; the first two set Theano's floatX to float32."""
    if model == "resnet":
        from demos.resnet.models import build as build_resnet

        return build_resnet(50, image_size=SHAPES[model][-1])
    return build(model)


def describe(graph: Any) -> dict[str, Any]:
    """Return facts for the record: the number of parameters, and the kernels that multiply matrices."""
    return {
        "parameters": sum(param.get_value(borrow=True).size for param in graph.params),
        "kernels": of_theano(),
    }
