"""Random programs, divided by rows; `make exact-programs` runs many more."""

from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import run


@settings(max_examples=200)
@given(st.integers(0, 2**31), st.integers(3, 15))
def test_random_programs(seed, n_steps):
    run(seed, n_steps)
