"""Demo 2: `synk.Data`, function inputs in memory that all ranks share.

A `synk.Data` is written once, and every rank reads its shard in place. It is read and written like a NumPy array. All
results are compared with NumPy and plain Theano.
"""

import argparse

import numpy as np

import synkhronos as synk

try:
    import theano
    import theano.tensor as T
except ImportError:  # Python 3.12 and later
    import pytensor as theano
    import pytensor.tensor as T


def check(what, got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=what)
    print(f"{what:50} {np.array2string(np.asarray(got), precision=4, threshold=6)}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one for each device)")
    ranks = synk.fork(parser.parse_args(argv).ranks)
    print(f"{ranks} rank(s)")

    x = T.matrix("x", dtype="float32")
    f = synk.function([x], (x**2).sum(axis=1).mean())
    f_theano = theano.function([x], (x**2).sum(axis=1).mean())
    synk.distribute()

    # Create it from a value; or create it with a variable's dtype and number of dimensions, and fill it later.
    values = np.random.RandomState(0).rand(11, 3).astype("float32")
    a = synk.data(values)
    b = synk.data(var=x, shape=(11, 3))
    b[:] = values
    check("from a value", f(a), f_theano(values))
    check("from a variable, filled in", f(b), f_theano(values))

    # Read and write with NumPy's indexing. All ranks see the new values at once.
    a[2:4] = -1
    a[[0, -1], 1] = 5
    values[2:4] = -1
    values[[0, -1], 1] = 5
    check("after writing rows", f(a), f_theano(values))
    check("every third row", a[::3], values[::3])
    print(f"{len(a)} rows, shape {a.shape}, dtype {a.dtype}, {a.ndim} dimensions")

    # Growing keeps the old rows. `oversize` allocates memory in advance, so that later growth needs no allocation.
    a.set_length(14, oversize=2)
    allocated = a.alloc_size
    a[11:] = values[:3]
    grown = np.concatenate([values, values[:3]])
    check("grown by three rows", f(a), f_theano(grown))
    a.set_length(20)
    assert a.alloc_size == allocated and a.shape == (20, 3)
    print(f"{a.size} elements used of {allocated} allocated")
    a.set_length(5)
    check("shrunk to five rows", f(a), f_theano(values[:5]))

    # A cast that can change values must be requested.
    try:
        a.set_value(np.ones((2, 3)))  # float64
    except TypeError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("a downcast went unnoticed")
    a.set_value(np.ones((2, 3)), force_cast=True)
    check("cast on demand", f(a), 3.0)

    # Create the data for every input of a function in one call.
    c = f.build_inputs(values)  # a list, for several inputs
    check("made by build_inputs", f(c), f_theano(values))
    c.free_memory()
    synk.close()
    print("demo 2: all results agree with NumPy and with those of one process")


if __name__ == "__main__":
    main()
