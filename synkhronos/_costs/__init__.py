"""Cost model of calls: measured constants of the machine, and the seconds that they predict.

`kernels` and `predict`, the model of training steps, import NumPy. Their names are imported on first use, because the
command line must start without it.
"""

import importlib
import typing

from synkhronos._costs.model import (
    Curve,
    Estimate,
    Exchange,
    Grid,
    Link,
    Machine,
    Product,
    Rates,
    Work,
    along_rows,
    choose,
    describe_machine,
    link_of,
    link_through,
    most_rows_by_slices,
    seconds_by_rows,
    seconds_on_controller,
    typical,
)
from synkhronos._costs.store import MOST_BUSY, Store, path_of_store

if typing.TYPE_CHECKING:
    from synkhronos._costs.kernels import Operand as Operand
    from synkhronos._costs.kernels import RowTimes as RowTimes
    from synkhronos._costs.kernels import Speeds as Speeds
    from synkhronos._costs.kernels import Spread as Spread
    from synkhronos._costs.kernels import contention_on as contention_on
    from synkhronos._costs.kernels import fit_row_times as fit_row_times
    from synkhronos._costs.kernels import reduction_on as reduction_on
    from synkhronos._costs.kernels import speeds_from as speeds_from
    from synkhronos._costs.kernels import speeds_of as speeds_of
    from synkhronos._costs.kernels import times_on as times_on
    from synkhronos._costs.kernels import write_speeds as write_speeds
    from synkhronos._costs.predict import AUTO as AUTO
    from synkhronos._costs.predict import Cluster as Cluster
    from synkhronos._costs.predict import PredictionTable as PredictionTable
    from synkhronos._costs.predict import Rule as Rule
    from synkhronos._costs.predict import StepPrediction as StepPrediction
    from synkhronos._costs.predict import Workload as Workload
    from synkhronos._costs.predict import predict_step as predict_step
    from synkhronos._costs.predict import predict_steps as predict_steps
    from synkhronos._costs.predict import rule_named as rule_named
    from synkhronos._costs.predict import to_hide as to_hide
    from synkhronos._costs.predict import verdict as verdict

_KERNELS = (
    "Operand",
    "RowTimes",
    "Speeds",
    "Spread",
    "contention_on",
    "fit_row_times",
    "reduction_on",
    "speeds_from",
    "speeds_of",
    "times_on",
    "write_speeds",
)
_PREDICT = (
    "AUTO",
    "Cluster",
    "PredictionTable",
    "Rule",
    "StepPrediction",
    "Workload",
    "predict_step",
    "predict_steps",
    "rule_named",
    "to_hide",
    "verdict",
)


def __getattr__(name: str) -> typing.Any:
    """Import the model of training steps when one of its names is used."""
    for module, names in (("kernels", _KERNELS), ("predict", _PREDICT)):
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
