"""Cost model of calls: measured constants of the machine, and the seconds that they predict.

`kernels` and `predict`, the model of training steps, import NumPy. They are not imported here, because the command line
must start without it.
"""

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
from synkhronos._costs.store import MOST_BUSY, Store, path_of_store
