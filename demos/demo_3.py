"""Demo 3: shared variables on all ranks, and collectives on them.

Every rank has a copy of each shared variable that a distributed function uses. An update changes the rank's own copy;
collectives move and combine the copies. All results are compared with NumPy.
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

    x = T.dmatrix("x")
    s = theano.shared(np.zeros(3), "s")
    f = synk.function([x], updates=[(s, x.mean(axis=0))])
    part = theano.shared(np.zeros((1, 3)), "part")
    total_of_part = synk.function([], (part.sum(), "sum"))
    synk.distribute()

    # An update is local: each rank now has the mean of its shard.
    values = np.random.RandomState(0).rand(13, 3)
    f(values)
    shares = np.split(values, np.cumsum(f.counts)[:-1])
    means = [share.mean(axis=0) for share in shares if len(share)]
    print(f"data points of each rank: {list(f.counts)}")
    if len(means) == ranks:
        check("gather: each rank's copy", synk.gather(s), means)
        check("reduce, not in place", synk.reduce(s, op="max", in_place=False), np.max(means, 0))
        check("... leaves the copies alone", synk.get_value(ranks - 1, s), means[-1])

    # Weighted by the numbers of rows, the average of the ranks' means is the mean of all rows.
    synk.all_reduce(s, op="avg", weights=f.counts)
    for rank in range(ranks):
        check(f"all_reduce: rank {rank}", synk.get_value(rank, s), values.mean(axis=0))

    # `set_value` changes one rank's copy; `broadcast` copies the controller's value to all ranks.
    synk.set_value(ranks - 1, s, np.full(3, 7.0))
    check("set_value on the last rank", synk.get_value(ranks - 1, s), [7, 7, 7])
    synk.broadcast(s, np.arange(3.0))
    check("broadcast of a value", synk.gather(s), [np.arange(3.0)] * ranks)
    synk.reduce(s, op="sum")
    check("reduce: the controller's copy", s.get_value(), ranks * np.arange(3.0))
    synk.broadcast(s)
    check("broadcast: the last rank's copy", synk.get_value(ranks - 1, s), ranks * np.arange(3.0))

    # `scatter` divides an array along axis 0. The shards may differ in length.
    synk.scatter(part, values)
    print(f"rows of each rank after scatter: {synk.get_lengths(part)}")
    assert sum(synk.get_lengths(part)) == len(values)
    check("the sum over scattered parts", total_of_part(), values.sum())
    check("gather, concatenated", synk.gather(part, nd_up=0), values)
    synk.all_gather(part)
    assert synk.get_shapes(part) == [values.shape] * ranks
    check("all_gather: the last rank's copy", synk.get_value(ranks - 1, part), values)
    synk.close()
    print("demo 3: all results agree with NumPy")


if __name__ == "__main__":
    main()
