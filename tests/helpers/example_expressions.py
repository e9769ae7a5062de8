"""Expressions of `example_programs`: each line is a program."""

PROGRAMS = """
x.sum()
x.mean()
x.mean(0)
x.mean(1)
x.sum(axis=0, keepdims=True)
x.std()
x.std(0)
x.var(axis=1)
x.prod(0)
x.prod(1)
T.prod(x)
x.max()
x.max(0)
x.max(1)
x.min(0)
x.max(axis=0, keepdims=True)
T.max(x, axis=(0, 1))
x.argmax(0)
x.argmax(1)
x.argmax()
x.argmin(axis=0)
T.max_and_argmax(x, 0)
T.max_and_argmax(x, 1)
T.all(x > -9)
T.any(x > 2, axis=0)
T.all(q > 0, axis=1)
q.sum()
q.prod(0)
q.max(0)
q.mean()
q.sum(1).mean()
f.sum()
f.mean(0)
(f * 2).std()
x.max(0) - x.min(0)
x.norm(2)
x.norm(2, axis=0)
x.norm(1, axis=1)
norm(x)
norm(x) * gain
norm(images, (0, 2, 3))
(m * v).sum() / m.sum()
(m[:, None] * x).sum(0) / m.sum()
T.switch(m > 0, v, 0).sum() / T.maximum(m.sum(), 1)
T.switch(T.eq(m, 0)[:, None], 0.0, x)
x * 0.9 ** T.arange(x.shape[0])[:, None]
v * 0.9 ** T.arange(v.shape[0])
v * T.arange(v.shape[0])[::-1]
T.arange(v.shape[0]) * 2 + 1
T.arange(1, v.shape[0] + 1) * v
T.arange(0, 2 * v.shape[0], 2) * v
T.arange(v.shape[0]).sum() * v
v / v.shape[0]
v.sum() / (v.shape[0] - 1)
T.ones((v.shape[0] + 1,))
T.ones((v.shape[0] + 1,))[1:] * v
T.ones((v.shape[0],))
T.ones_like(x).sum()
T.zeros_like(x) + a
T.zeros((x.shape[0], 3))
T.zeros((x.shape[0], x.shape[0]))
T.zeros((x.shape[0] // 2, 3)).sum() + x
T.zeros((x.shape[0] * 2,)) + T.concatenate([v, v])
T.alloc(B, x.shape[0], D) * x
T.alloc(v, 3, v.shape[0])
T.alloc(v[:, None], v.shape[0], 3)
T.alloc(x.mean(0), x.shape[0], D)
T.eye(x.shape[0])
T.eye(x.shape[0]).dot(x)
T.identity_like(x.dot(x.T)) * a
x.reshape((2, -1))
x.reshape((-1,))
x.flatten()
x.reshape((x.shape[0], 2, 2))
x.reshape((-1, 2))
x.reshape((-1, D))
x.reshape((-1, x.shape[1]))
x.reshape((x.shape[0], -1))
x.reshape((x.shape[0] * 2, 2))
x.reshape((2 * x.shape[0], -1)).sum(1)
x.reshape((x.shape[1], x.shape[0]))
x.reshape((x.shape[0], T.ge(v, T.sort(v)[7]).sum()))
x.reshape((T.ge(v, T.sort(v)[7]).sum(), x.shape[0])).sum(0)
x.reshape((x.shape[0] * (T.ge(v, T.sort(v)[-2]).sum()), 2))
T.zeros((T.ge(v, T.sort(v)[7]).sum(), x.shape[0])) + x.T
T.zeros((x.shape[0], T.ge(v, T.sort(v)[7]).sum())) * x
x.reshape((2, x.shape[0], 2))
x.reshape((D, -1)).sum(0)
x.T.reshape((D, x.shape[0]))
x.T.reshape((2, 2, x.shape[0])).sum(1)
x.T.reshape((x.shape[0], D))
x.T.flatten()
s.reshape((s.shape[0] * s.shape[1], s.shape[2]))
s.reshape((-1, s.shape[2])).dot(W).reshape((s.shape[0], s.shape[1], K))
s.reshape((s.shape[0], s.shape[1] * s.shape[2]))
s.flatten(2)
s.flatten(2).reshape(s.shape)
s.dimshuffle(1, 0, 2).reshape((s.shape[1] * s.shape[0], D)).dot(W)
s.dimshuffle(1, 0, 2).reshape((s.shape[1] * s.shape[0], D)).reshape((s.shape[1], s.shape[0], D))
s.dimshuffle(1, 0, 2).flatten(2)
s.dimshuffle(2, 1, 0).reshape((D * L, -1))
s.reshape((-1, D)).reshape((s.shape[0], L, D)).mean(0)
s.reshape((-1, s.shape[2]))[:3]
s.reshape((s.shape[1], s.shape[0], s.shape[2]))
images.flatten(2)
images.reshape((images.shape[0], 2, 36)).max(2)
s.dot(W)
T.tensordot(s, W, [[2], [0]])
T.tensordot(s, s, [[0, 1], [0, 1]])
T.tensordot(x, s, [[0], [0]])
T.dot(x, W)
T.dot(x.T, x)
T.dot(x, x.T)
T.dot(x.T, c)
T.dot(v, x)
T.dot(v, v)
T.dot(x, B)
T.dot(c.T, x)
T.dot(x.T, v)
T.dot(table.T, x)
T.outer(v, v)
T.outer(v, B)
T.dot(q.T, q)
T.dot(T.dot(x, U), T.dot(x, U).T)
T.batched_dot(s, s.dimshuffle(0, 2, 1))
T.batched_dot(s, x)
T.batched_dot(x, x)
T.batched_tensordot(s, s, [[1], [1]])
x + c
x * c
x + table
v * each
T.dot(x * table, W)
(v - each).sum()
(x - x.mean(0)).dot(U)
x / x.sum(axis=1, keepdims=True)
x / x.sum(axis=0, keepdims=True)
x - x.max(axis=0)
x + x.T[0][:, None]
x + x[0]
x + x[-1]
x[1:]
x[:-1]
x[::-1]
x[::2]
x[: x.shape[0] // 2]
x[x.shape[0] // 2 :].sum(0)
x[1:] - x[:-1]
x[0]
x[-1].sum()
x[:, 1:]
x[:, ::-1]
x[:, 0]
x[:, :2] * x[:, 2:]
x[:, -1] * v
x[:][:, 0]
x[T.arange(x.shape[0])]
x[T.arange(x.shape[0])[::-1]]
x[y]
x[:, y[:2]]
x[y, y]
x[[0, 2, 1]]
x[:, [0, 2]]
x[(x[:, 0] > 0).nonzero()]
x[T.gt(v, 0).nonzero()[0]].sum(0)
v[v > 0]
s[:, 0]
s[:, -1].dot(W)
s[:, ::-1]
s[0]
s[:, :, 1]
s[y]
s.dimshuffle(1, 0, 2)[0]
s.dimshuffle(1, 0, 2)[-1]
s[T.arange(s.shape[0]), y]
s[T.arange(s.shape[0]), y, y]
x[T.arange(x.shape[0]), 0]
x[T.arange(y.shape[0]), y]
x[T.arange(y.shape[0])[::-1], y]
x[T.arange(y.shape[0]) // 2, y]
x[T.arange(v.shape[0] - 1), y[1:]]
c[T.arange(y.shape[0]), y]
T.concatenate([x, x])[T.arange(y.shape[0]), y]
E[T.arange(E.shape[0]), y[: E.shape[0]]]
E[T.arange(E.shape[0]), 0].sum() * v
table[T.arange(table.shape[0]), y]
x[T.arange(x.shape[0])[:, None], ids % D]
x[T.arange(x.shape[0])[:, None], y[:, None]][:, 0] * v
x[T.arange(x.shape[0])[:, None], y[:2]]
x[T.arange(x.shape[0])[:, None], y[None, :]]
x[T.arange(x.shape[0]).reshape((-1, 1)), ids % D]
x[T.arange(x.shape[0])[None, :], ids.T % D]
s[T.arange(s.shape[0])[:, None, None], T.arange(s.shape[1])[None, :, None], ids[:, None, :] % D]
T.inc_subtensor(x[T.arange(x.shape[0])[:, None], ids % D], v[:, None])
T.inc_subtensor(T.zeros_like(x)[T.arange(y.shape[0])[:, None], y[:, None]], v[:, None])
T.concatenate([c, c])[T.arange(y.shape[0]), y]
T.set_subtensor(T.concatenate([c, c])[T.arange(y.shape[0]), y], v)
T.zeros((x.shape[0], D))[T.arange(y.shape[0]), y] * v
T.set_subtensor(x[:, 0], T.unbroadcast(T.constant([2.0]), 0))
T.inc_subtensor(x[T.arange(y.shape[0]), y], T.unbroadcast(T.constant([2.0]), 0))
T.inc_subtensor(E[y], T.unbroadcast(T.constant([[2.0, 1, 0, 1]]), 0))
table[T.arange(y.shape[0]), y]
E[y]
E[ids]
E[ids].mean(1).dot(W)
E[ids.T].sum(0)
E[y, y]
E[ids, ids % D]
E[y[::-1]]
E.take(y, axis=0)
E[ids[:, 0]] * x
T.set_subtensor(x[:, 0], v)
T.set_subtensor(x[:, 1:], 0.0)
T.inc_subtensor(x[:, 0], c[:, 0])
T.set_subtensor(x[0], 1.0)
T.set_subtensor(x[1:], x[:-1])
T.inc_subtensor(x[::2], 1.0)
T.set_subtensor(c[:, 0], v)
T.inc_subtensor(c[:, 1:3], x[:, :2])
T.inc_subtensor(c[1:], x[1:])
T.inc_subtensor(table[:, :2], z[:, 2:])
T.set_subtensor(T.zeros((x.shape[0], 6))[:, 1:5], x)
T.inc_subtensor(E[y], x)
T.inc_subtensor(E[y], 1.0)
T.inc_subtensor(E[y], B)
T.inc_subtensor(c.T[[0, 2, 2]], x.T[:K])
T.inc_subtensor(c.T[[0, 2]], v)
T.set_subtensor(E[y], x)
T.inc_subtensor(T.zeros_like(E)[y], x)
T.inc_subtensor(T.zeros((K,))[y], v)
T.inc_subtensor(x[T.arange(y.shape[0]), y], v)
T.set_subtensor(x[T.arange(y.shape[0]), y], 0.0)
T.set_subtensor(T.zeros_like(x)[T.arange(y.shape[0]), y], 1)
T.inc_subtensor(c[T.arange(y.shape[0]), y], v)
T.inc_subtensor(x[T.arange(y.shape[0])[::-1], y], v)
T.inc_subtensor(E[y, y], v)
T.extra_ops.to_one_hot(y, K)
T.nnet.softmax(x)
T.nnet.softmax(x.T)
T.nnet.softmax(x.dot(W) + b)
T.nnet.softmax(v)
T.nnet.logsoftmax(x)
T.exp(x) / T.exp(x).sum(0)
T.exp(x - x.max(0)) / T.exp(x - x.max(0)).sum(0)
T.nnet.softmax(s.reshape((-1, s.shape[2]))).reshape(s.shape)
T.nnet.softmax_op(x.dot(W) + b)
T.nnet.softmax_graph(x)
T.nnet.categorical_crossentropy(T.nnet.softmax(x.dot(W)), y)
T.nnet.categorical_crossentropy(T.nnet.softmax(x.dot(W)), y).mean()
T.nnet.categorical_crossentropy(T.nnet.softmax(x), T.nnet.softmax(z)).mean()
T.nnet.crossentropy_softmax_1hot(x.dot(W), y)
T.nnet.crossentropy_softmax_1hot_with_bias(x.dot(W), b, y)
T.nnet.binary_crossentropy(T.nnet.sigmoid(v), m).mean()
nll(x.dot(W) + b).mean()
nll(x.dot(W)).sum() / v.shape[0] + 0.01 * (W**2).sum()
(m * nll(x.dot(W))).sum() / m.sum()
(m * nll(x.dot(W))).mean() + 1e-3 * abs(W).sum()
-T.mean(T.log(T.nnet.softmax(x.dot(W)))[T.arange(y.shape[0]), y])
T.eq(x.dot(W).argmax(1), y).mean()
T.neq(T.argmax(x.dot(W), axis=-1), y).sum()
T.mean(T.eq(x.dot(W).argmax(1), y), dtype="float32")
T.nnet.relu(x.dot(W)).mean()
T.nnet.relu(x.dot(U) + B, 0.1).dot(W)
T.nnet.elu(x)
T.clip(x, -1, 1)
T.tanh(x.dot(U)).dot(U.T).sum()
T.nnet.h_softmax(x, v.shape[0], 4, 2, 2, T.alloc(0.1, 4, 2), T.alloc(0.0, 2), T.alloc(0.2, 2, 4, 2), T.alloc(0.0, 2, 2))
T.nnet.conv2d(images, filters)
T.nnet.conv2d(images, filters, border_mode="half", subsample=(2, 2))
T.nnet.conv2d(images, filters, input_shape=(N, 2, 6, 6), filter_shape=(3, 2, 3, 3))
T.nnet.conv2d(images, filters, filter_flip=False).sum()
T.nnet.conv2d(filters, images[:, :, :2, :2])
T.nnet.relu(T.nnet.conv2d(images, filters)).flatten(2).dot(V)
nll(norm(T.nnet.conv2d(images, filters), (0, 2, 3)).flatten(2).dot(V)).mean()
T.nnet.conv2d(images.dimshuffle(1, 0, 2, 3), T.nnet.conv2d(images, filters).dimshuffle(1, 0, 2, 3))
pool_2d(images, (2, 2), ignore_border=True)
pool_2d(images, (2, 2), ignore_border=True, mode="average_inc_pad")
pool_2d(images, (3, 3), stride=(2, 2), ignore_border=True, mode="sum")
pool_2d(images.dimshuffle(2, 3, 0, 1), (3, 2), ignore_border=True)
pool_2d(images.dimshuffle(1, 0, 2, 3), (2, 2), ignore_border=True)
pool_2d(s, (2, 2), ignore_border=True)
pool_3d(images, (2, 2, 2), ignore_border=True)
lrn(images)
T.nnet.bn.batch_normalization_train(x, gain, gain * 0.5, "per-activation")[0]
T.nnet.bn.batch_normalization_train(x, gain, gain * 0.5, "per-activation", 1e-4, 0.1, gain, gain * 2)
T.nnet.bn.batch_normalization_train(images, channel, channel, "spatial", 1e-4, 0.1, channel, channel)
T.nnet.bn.batch_normalization_test(x, gain, gain, gain * 2, abs(gain), "per-activation")
T.nnet.bn.batch_normalization_train(s, T.ones((1, L, D)), T.zeros((1, L, D)), (0,))[0]
T.nnet.bn.batch_normalization_train(s, T.ones((N, 1, D)), T.zeros((N, 1, D)), (1,))[0]
T.concatenate([x, z], axis=1)
T.concatenate([x, z], axis=0)
T.concatenate([x, c], axis=1)
T.concatenate([x, table, T.ones((x.shape[0], 1))], axis=1)
T.concatenate([x, T.zeros((1, D))], axis=0)
T.concatenate([v, [1.0]])
T.stack([v, v * 2])
T.stack([v, m], axis=1)
T.stack([v.sum(), m.sum(), a])
T.stack([x, z]).sum(0)
T.join(-1, x, z)
T.join(-2, x, z)
x[T.arange(3), 0]
x[T.arange(x.shape[1]), 0]
T.set_subtensor(x[T.arange(2), 0], 7.0)
T.join(T.cast(x.shape[0] > 10, "int64"), T.dot(x.T, x), T.dot(x.T, z))
T.split(x, [1, 3], 2, axis=1)
T.split(x, [4, 7], 2, axis=0)
T.horizontal_stack(x, z)
T.tile(x, (1, 2))
T.tile(x, (2, 1))
T.repeat(x, 2, axis=0)
T.repeat(x, 2, axis=1)
T.extra_ops.RepeatOp(axis=-2)(x, 2)
T.extra_ops.RepeatOp(axis=-1)(x, 2)
T.sort(x, axis=-2)
T.cumsum(x, axis=-2)
T.concatenate([x, z], axis=-2)
T.sort(x, axis=0)
T.sort(x, axis=1)
T.sort(x, axis=-1)
T.sort(x, axis=None)
T.argsort(x, axis=0)
T.argsort(x, axis=1)
T.sort(v)
T.cumsum(x, axis=0)
T.cumsum(x, axis=1)
T.cumsum(x)
T.cumprod(x, axis=1)
T.cumsum(v)
T.extra_ops.diff(x, axis=0)
T.extra_ops.diff(x, axis=1)
T.diagonal(x[:, :, None] - x[:, None, :], 0, 1, 2)
T.diagonal(T.dot(x, x.T), 1)
x.T
x.dimshuffle(0, "x", 1)
x.dimshuffle("x", 1, 0, "x").sum(0)
v.dimshuffle(0, "x") - v.dimshuffle("x", 0)
((x[:, None, :] - x[None, :, :]) ** 2).sum(2)
((x[:, None, :] - E[None, :, :]) ** 2).sum(2).min(1)
x.shape
x.shape[0]
x.shape[0] * x.shape[1]
x.size * a
T.prod(x.shape)
T.stack([x.shape[0], x.shape[1]]) * 2
x.shape[0] % 3
T.cast(x.shape[0], "float64") ** 0.5 * x
T.sqrt(x.shape[0]) * v.sum()
T.switch(x.shape[0] > 5, x, -x)
x * (x.shape[0] > 5)
x.mean() * v.shape[0]
x.dot(W).sum(0) / x.shape[0] - b
T.diag(x.dot(x.T))
T.diag(v)
T.nlinalg.trace(x.T.dot(x))
T.tril(x.dot(x.T)).sum()
T.triu(x)
T.nnet.sigmoid(x.dot(x.mean(0)))
T.cast(v.sum(), "int32") * v
T.cast(x.sum(0), "float32")
T.floor(v.sum())
v.sum() * m.sum()
v.sum() + m.sum() - 2 * v.sum()
v.sum() * v.sum()
v.sum() / 2 - m.sum() * 3
v.sum() + b.sum()
-(v.sum())
1 / v.sum()
v.sum() ** 2
v.sum().clip(-1, 1)
v.sum() * T.dot(B, B)
x.sum(0).dot(B)
x.sum(0).sum()
x.sum(0).max()
x.sum(0)[1:3].sum()
x.sum(0).reshape((2, 2))
x.sum(0).dimshuffle("x", 0) + x
T.fill(x.sum(0), 2.0)
T.fill(B, v.sum())
T.fill(x, v.sum())
T.fill(v.sum(), a)
T.zeros_like(v.sum()) + 1
T.stack([v.sum(), m.sum()]).max()
T.concatenate([x.sum(0), z.sum(0)]).sum()
T.bitwise_and(q, 3).sum(0)
T.xor(q > 0, q > 1).sum()
T.extra_ops.bincount(y)
T.nnet.confusion_matrix(y, y)[0]
T.extra_ops.compress(T.constant([1, 0, 1, 1]), x, axis=1)
T.extra_ops.Unique()(y)
T.extra_ops.fill_diagonal(x, 1.0)
T.roll(x, 1, axis=0)
T.roll(x, 1, axis=1)
T.patternbroadcast(x.sum(0, keepdims=True), (True, False)) * x
T.addbroadcast(v[:1], 0) * v
T.unbroadcast(x.mean(0, keepdims=True), 0).shape
T.opt.Assert("positive")(x, T.gt(x.shape[0], 0))
T.opt.Assert("positive")(x, T.gt((x**2).sum(), 0))
theano.gradient.disconnected_grad(x.mean(0)) * x
theano.gradient.grad_clip(x, -0.1, 0.1) ** 2
theano.tensor.specify_shape(x, (N, D)).sum()
theano.printing.Print("x", attrs=("shape",))(x) * 2
theano.ifelse.ifelse(T.gt(v.sum(), 0), x * 2, x - 1)
theano.ifelse.ifelse(T.gt(a, 0), v.sum(), m.sum())
theano.ifelse.ifelse(T.gt(a, 0), [x, v.sum()], [z, B.sum()])
theano.ifelse.ifelse(T.gt(a, 0), x, c)
theano.ifelse.ifelse(T.gt(a, 0), c[:2], x)
layer(x, U)
T.extra_ops.RepeatOp(axis=0)(x, T.as_tensor_variable(2))
T.extra_ops.RepeatOp(axis=1)(x, T.as_tensor_variable([1, 2, 0, 1]))
T.tile(x, (2, 1, 1))
x[: x.shape[0]]
theano.sparse.dot(x, matrix)
theano.sparse.dot(matrix.T, x.T)
theano.sparse.dot(x.T, theano.sparse.basic.csr_from_dense(c))
theano.sparse.structured_dot(matrix, x.dot(W).T).T
constant(theano.sparse.basic.csm_data(T.grad((theano.sparse.structured_dot(matrix.T, x.T) ** 2).sum(), matrix)))
theano.scan(lambda row, total: total + row, sequences=x, outputs_info=T.zeros((D,)))[0]
theano.scan(lambda h: T.tanh(h.dot(U)), outputs_info=x, n_steps=3)[0][-1]
theano.scan(lambda k: k * 2.0, sequences=T.arange(x.shape[0]))[0] * v
theano.map(lambda row: row.sum(), x)[0]
theano.map(lambda row, i: T.tanh(row.dot(U)) * i, [x, T.arange(x.shape[0])])[0]
theano.map(lambda row, one: (row * one).sum(), [x, table])[0]
theano.reduce(lambda row, total: total + row**2, x, T.zeros((D,)))[0]
theano.foldl(lambda row, total: total * 0.5 + row**2, steps, x)[0]
scan_rnn()[-1]
scan_rnn().sum()
scan_rnn(T.alloc(B, s.shape[0], D))[-1]
scan_rnn(T.ones((s.shape[0], 1)).dot(gain))[-1]
scan_rnn(x)[-1]
scan_rnn(c)[-1]
scan_rnn(go_backwards=True)[::-1].dimshuffle(1, 0, 2)
scan_rnn(truncate_gradient=2)[-1]
scan_until()[-1]
scan_until()
scan_normed()[-1]
scan_nested()[-1]
scan_masked()[-1]
scan_two_taps()[-1]
scan_sums(lambda total: total * 0.9, T.zeros((D,)))
scan_sums(T.tanh, B)
scan_sums(lambda total: total * 0.5, B)
scan_descent()
theano.scan(lambda one, h: T.tanh(h.dot(one * U)), E, x)[0][-1]
theano.scan(lambda words, h: T.tanh(E[words].dot(U) + h), ids.T, T.zeros((ids.shape[0], D)))[0].mean(0)
theano.scan(lambda row, h: [T.tanh(row.dot(U) + h), h.sum(1)], steps, [T.zeros((s.shape[0], D)), None])[0][1].T
theano.scan(lambda row, h: [T.tanh(row.dot(U) + h), h.sum(0)], steps, [T.zeros((s.shape[0], D)), None])[0][1]
theano.scan(lambda row, k, h: [k + 1, T.tanh(row + h) * k], steps, [T.constant(0.0), T.zeros_like(x)])[0][1][-1]
theano.scan(lambda row, h, one: T.tanh(row.dot(U) + h) * one, steps, T.zeros((s.shape[0], D)), non_sequences=z)[0][-1]
theano.scan(lambda row: row.reshape((row.shape[0] * 2, 2)), steps)[0]
theano.scan(lambda row, h: T.sort(row + h, axis=0), steps, T.zeros((s.shape[0], D)))[0][-1]
step(nll(scan_rnn()[-1].dot(W)).mean(), U, W)
T.grad((T.grad((scan_rnn()[-1] ** 2).sum(), U) ** 2).sum(), U)
step(nll(x.dot(W) + b).mean(), W, b)
step((m * nll(x.dot(U).dot(W) + b)).sum() / m.sum() + 1e-2 * (W**2).sum(), W, b, U)
adam(nll(x.dot(W) + b).mean(), W, b)
adam(nll(norm(x.dot(U)).dot(W) + b).mean() + x.dot(U).std(), W, U)
adam(nll(E[ids].mean(1).dot(W)).mean(), E, W)
adam(((v - (x * table).sum(1)) ** 2).mean() + 1e-2 * (table**2).sum(), table)
step(nll(T.nnet.relu(norm(T.nnet.conv2d(images, filters), (0, 2, 3))).flatten(2).dot(V)).mean(), filters, V)
step(abs(x.mean(0) - z.mean(0)).sum() + x.dot(U).mean(), U)
step(((x.dot(U).mean(0) - z.dot(U).mean(0)) ** 2).sum(), U)
T.grad(T.grad(nll(x.dot(W)).mean(), W).norm(2), W)
T.jacobian(x.dot(W).sum(0), W)
T.grad((T.grad((x.dot(U) ** 2).sum(), x) ** 2).sum(), U)
x.dot(W).mean(0) - b, (x**2).mean()
""".strip().splitlines()
