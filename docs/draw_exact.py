"""Draw docs/exact.png, the partition of a small exact function: ``python docs/draw_exact.py``; needs Graphviz."""

from pathlib import Path

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk

synk.fork(2, use_gpu=False)
x, w = T.dmatrix("x"), theano.shared(np.ones(4), "w")
scores = T.dot(x - x.mean(axis=0), w)
loss = T.sqr(scores).mean()
scores.name, loss.name = "scores", "loss"
synk.function([x], loss, exact=True).partition.picture(Path(__file__).with_name("exact.png"))
synk.close()
