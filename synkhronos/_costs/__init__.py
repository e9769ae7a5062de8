"""Cost model of calls: measured constants of the machine, and the seconds that they predict."""

from synkhronos._costs.kernels import (
    KernelRegressor,
    Roofline,
    RowTimes,
    Spread,
    expected_slowest,
    fit_row_times,
    held_out_errors,
    rescaled,
)
from synkhronos._costs.model import (
    Curve,
    Estimate,
    Exchange,
    Grid,
    Machine,
    Product,
    Rates,
    Work,
    along_rows,
    choose,
    describe_machine,
    most_rows_by_slices,
    seconds_by_rows,
    seconds_on_controller,
    typical,
)
from synkhronos._costs.predict import (
    Cluster,
    Link,
    Rule,
    Workload,
    bytes_sent,
    centre_saturates,
    centre_step,
    cluster_of,
    delayed_step,
    exchange_seconds,
    fit_link,
    local_step,
    overlapped,
    predict_step,
    predict_steps,
    smallest_delay,
    verdict,
)
from synkhronos._costs.store import MOST_BUSY, Store, path_of_store
