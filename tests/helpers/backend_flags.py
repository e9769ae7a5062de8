"""Which of several processes that run the tests this is, and the engine's flags; to be imported before the engine."""

import os
import sys

assert not {"theano", "pytensor"} & sys.modules.keys(), "the engine has been imported, and does not see these flags"

# Users' functions take a slower path where an analysis fails; tests fail.
os.environ.setdefault("SYNKHRONOS_RAISE_ANALYSIS_ERRORS", "1")

#: ``"gw0"``, ``"gw1"``, …; empty where one process runs them all.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")

#: The flag that chooses the folder of compiled code, for programs that must have no other flags. An engine lets one
#: process at a time compile into a folder, so each process that runs tests has its own.
FOLDER = "" if WORKER in ("", "gw0") else f"compiledir_format=compiledir_{WORKER}"

if FOLDER:
    for _name in ("THEANO_FLAGS", "PYTENSOR_FLAGS"):
        os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), FOLDER]))

#: Nothing is optimised: that takes a third of the time from a first run, and data of tests are small.
UNOPTIMIZED = "-O0 -g0"

# PyTensor's C code compiles in seconds where numba takes a minute; tests that are run with both name another linker.
for _name, _flag in (
    ("THEANO_FLAGS", f"gcc.cxxflags={UNOPTIMIZED}"),
    ("PYTENSOR_FLAGS", f"gcc__cxxflags={UNOPTIMIZED}"),
    ("PYTENSOR_FLAGS", "linker=cvm"),
):
    _flags = os.environ.get(_name, "")
    if _flag.split("=")[0] + "=" not in _flags:
        os.environ[_name] = ",".join(filter(None, [_flag, _flags]))
