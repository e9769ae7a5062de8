"""GPU interface of the backend for PyTensor, which computes on CPU cores: it refuses all requests for GPUs."""

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
    """Return ``None``: this process holds no GPU."""
    return None


def bind(device: str, rank: int, quiet: bool) -> Any:
    """Refuse a GPU.

    Raises
    ------
    DeviceError
    """
    raise DeviceError(f"{device} cannot be used: PyTensor computes on CPU cores; GPUs need Theano")


def unbind() -> None:
    """Do nothing: no GPU is bound."""


def is_device_array(value: Any) -> bool:
    """Return whether a value is an array on a GPU: never."""
    return False


def is_device_type(type_: Any) -> bool:
    """Return whether a type is that of arrays on a GPU: never."""
    return False


def to_host(value: Any) -> np.ndarray:
    """Return a value as a NumPy array."""
    return np.asarray(value)


def as_asked(value: Any, output: Any) -> Any:
    """Return the value of an output unchanged."""
    return value


def to_device(value: Any) -> Any:
    """Raise `DeviceError`; not called, because no session has GPUs."""
    raise DeviceError("PyTensor computes on CPU cores")


def stay_on_device(var: Any) -> Any:
    """Raise `DeviceError`; not called, because no session has GPUs."""
    raise DeviceError("PyTensor computes on CPU cores")


def read(array: Any, out: np.ndarray) -> None:
    """Raise `DeviceError`; not called, because no array is on a GPU."""
    raise DeviceError("PyTensor computes on CPU cores")


def write(array: Any, value: np.ndarray) -> None:
    """Raise `DeviceError`; not called, because no array is on a GPU."""
    raise DeviceError("PyTensor computes on CPU cores")
