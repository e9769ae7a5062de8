"""There are no GPUs here: PyTensor computes on CPU cores. What is asked for all the same is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.errors import DeviceError

__all__ = [
    "as_asked",
    "bind",
    "bound",
    "is_device_array",
    "is_device_type",
    "read",
    "stay_on_device",
    "to_device",
    "to_host",
    "unbind",
    "write",
]


def bound() -> str | None:
    """Name the GPU that this process holds: none."""
    return None


def bind(device: str, rank: int, quiet: bool) -> Any:
    """Refuse a GPU.

    Raises
    ------
    DeviceError
    """
    raise DeviceError(f"{device} cannot be used: PyTensor computes on CPU cores; GPUs need Theano")


def unbind() -> None:
    """Nothing is bound."""


def is_device_array(value: Any) -> bool:
    """Whether a value is an array on a GPU."""
    return False


def is_device_type(type_: Any) -> bool:
    """Whether a type is that of arrays on a GPU."""
    return False


def to_host(value: Any) -> np.ndarray:
    """A value as a NumPy array."""
    return np.asarray(value)


def as_asked(value: Any, output: Any) -> Any:
    """The value of an output, as its type says."""
    return value


def to_device(value: Any) -> Any:
    """No value comes here: no session has GPUs."""
    raise DeviceError("PyTensor computes on CPU cores")


def stay_on_device(var: Any) -> Any:
    """No expression comes here: no session has GPUs."""
    raise DeviceError("PyTensor computes on CPU cores")


def read(array: Any, out: np.ndarray) -> None:
    """No array comes here: none is on a GPU."""
    raise DeviceError("PyTensor computes on CPU cores")


def write(array: Any, value: np.ndarray) -> None:
    """No array comes here: none is on a GPU."""
    raise DeviceError("PyTensor computes on CPU cores")
