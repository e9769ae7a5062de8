"""Backend flags for tests, and the name of this pytest process; to be imported before the backend."""

import os
import sys

assert not {"theano", "pytensor"} & sys.modules.keys(), "the backend was imported before these flags were set"

# In tests, a failed analysis is an error. For users, it falls back to a slower path.
os.environ.setdefault("SYNKHRONOS_RAISE_ANALYSIS_ERRORS", "1")

# Tests of sharding need the plan by rows, whatever is faster here; tests of the choice ask for it.
os.environ.setdefault("SYNKHRONOS_PLAN", "rows")

#: ``"gw0"``, ``"gw1"``, … under pytest-xdist, otherwise empty.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")

#: The flag for the folder of compiled code, for programs that must have no other flags. Only one process at a time
#: can compile into a folder, so each pytest process has its own.
FOLDER = "" if WORKER in ("", "gw0") else f"compiledir_format=compiledir_{WORKER}"

if FOLDER:
    for _name in ("THEANO_FLAGS", "PYTENSOR_FLAGS"):
        os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), FOLDER]))

#: C code is not optimized: this saves a third of the time of a first run, and data in tests are small.
UNOPTIMIZED = "-O0 -g0"

# By default, PyTensor compiles C code, in seconds instead of numba's minute. `make test-numba` sets another linker.
for _name, _flag in (
    ("THEANO_FLAGS", f"gcc.cxxflags={UNOPTIMIZED}"),
    ("PYTENSOR_FLAGS", f"gcc__cxxflags={UNOPTIMIZED}"),
    ("PYTENSOR_FLAGS", "linker=cvm"),
):
    _flags = os.environ.get(_name, "")
    if _flag.split("=")[0] + "=" not in _flags:
        os.environ[_name] = ",".join(filter(None, [_flag, _flags]))
