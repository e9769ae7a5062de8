"""Fixtures of unit tests."""

import pytest
from fake_cuda_libraries import build_cache


@pytest.fixture
def empty_cache(tmp_path):
    """Return the path of a loader cache that lists no folder."""
    return build_cache(tmp_path / "cache-of-nothing")
