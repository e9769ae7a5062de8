"""Which of several processes that run the tests this is, and the engine's flags; to be imported before the engine."""

import os

#: ``"gw0"``, ``"gw1"``, …; empty where one process runs them all.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")

if WORKER not in ("", "gw0"):  # an engine lets one process at a time compile into a folder, so each has its own
    for _name in ("THEANO_FLAGS", "PYTENSOR_FLAGS"):
        _flags = filter(None, [os.environ.get(_name), f"compiledir_format=compiledir_{WORKER}"])
        os.environ[_name] = ",".join(_flags)

# PyTensor's C code compiles in seconds where numba takes a minute; the tests that are run with both name another linker
if "linker=" not in os.environ.get("PYTENSOR_FLAGS", ""):
    os.environ["PYTENSOR_FLAGS"] = ",".join(filter(None, ["linker=cvm", os.environ.get("PYTENSOR_FLAGS")]))
