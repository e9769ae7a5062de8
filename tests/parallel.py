"""Which of several processes that run the tests this is; to be imported before Theano."""

import os

#: ``"gw0"``, ``"gw1"``, …; empty where one process runs them all.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")

if WORKER not in ("", "gw0"):  # Theano lets one process at a time compile into a folder, so each has its own
    _flags = filter(None, [os.environ.get("THEANO_FLAGS"), f"compiledir_format=compiledir_{WORKER}"])
    os.environ["THEANO_FLAGS"] = ",".join(_flags)
