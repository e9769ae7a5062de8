"""Hypothesis strategies for several modules of tests."""

import numpy as np
from hypothesis import strategies as st


@st.composite
def batches(draw, length):
    """Draw a ``batch=`` for ``length`` rows, and the equivalent NumPy index."""
    kind = draw(st.sampled_from(["none", "int", "slice", "list", "array", "mask"]))
    if kind == "none":
        return None, slice(None)
    if kind == "int":
        count = draw(st.integers(0, length))
        return draw(st.sampled_from([count, np.int64(count), np.uint8(count)])), slice(count)
    bound = st.none() | st.integers(-length, length)
    if kind == "slice":
        step = st.none() | st.integers(-7, 7).filter(bool)
        picked = slice(draw(bound), draw(bound), draw(step))
        return picked, picked
    if kind == "mask":
        mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        index = np.array(mask, dtype=bool)
        return (mask if draw(st.booleans()) and mask else index), index
    indices = draw(st.lists(st.integers(-length, length - 1), max_size=80)) if length else []
    index = np.array(indices, dtype=np.int64)
    if kind == "list":
        return draw(st.sampled_from([list, tuple]))(indices), index
    dtypes = ["int8", "int16", "int32", "int64"] + (["uint8", "uint64"] if not index.size or index.min() >= 0 else [])
    return index.astype(draw(st.sampled_from(dtypes))), index
