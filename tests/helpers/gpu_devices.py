"""The GPUs of this machine."""

import pytest

from synkhronos._session.devices import _list_gpus


def gpus(kind):
    """Return the names of the GPUs of a kind, ``"cuda"`` or ``"opencl"``, or skip the test if there are none."""
    names = _list_gpus(kind)
    if isinstance(names, str):
        pytest.skip(names)
    return names
