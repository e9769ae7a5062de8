"""The GPUs of this machine."""

import pytest

from synkhronos._session.devices import _list_gpus


def gpus(kind):
    """The names of the GPUs of a kind, ``"cuda"`` or ``"opencl"``; without any the test is skipped."""
    names = _list_gpus(kind)
    if isinstance(names, str):
        pytest.skip(names)
    return names
