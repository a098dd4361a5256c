"""Programs of PaddlePaddle 2.6.2 with its own results: the data of `program/tests/imports.rs`.

    sh bench/peers/install.sh paddle /tmp/kits
    /tmp/kits/paddle/bin/python program/tests/paddle/make.py

writes, beside itself, for each program (or those in the arguments) NAME.main.pb and NAME.startup.pb (ProgramDesc without call stacks) and
NAME.json: the parameters before and after five steps, the values that were fed, and the losses.
"""

import json
import os
import sys

import numpy as np
import paddle
from paddle.base.proto import framework_pb2

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 5
BATCH = 6
PIXELS, HIDDEN, CLASSES = 5, 4, 3
ROWS, WIDTH, WORDS = 11, 3, 4
FIELDS, NUMBERS = 2, 3

F = paddle.nn.functional


def fc():
    """Two layers and a softmax: pixels to a class."""
    pixels = paddle.static.data("pixels", [None, PIXELS], "float32")
    label = paddle.static.data("label", [None, 1], "int64")
    hidden = paddle.static.nn.fc(pixels, HIDDEN, activation="relu")
    scores = paddle.static.nn.fc(hidden, CLASSES)
    return paddle.mean(F.softmax_with_cross_entropy(scores, label))


def linear():
    """The same with matmul_v2, tanh and cross_entropy's mean."""
    pixels = paddle.static.data("pixels", [None, PIXELS], "float32")
    label = paddle.static.data("label", [None, 1], "int64")
    hidden = paddle.tanh(paddle.nn.Linear(PIXELS, HIDDEN)(pixels))
    scores = paddle.nn.Linear(HIDDEN, CLASSES)(hidden)
    return paddle.mean(F.softmax_with_cross_entropy(scores, label))


def embedding(is_sparse):
    """Words' rows, summed, against a class."""

    def network():
        words = paddle.static.data("words", [None, WORDS], "int64")
        label = paddle.static.data("label", [None, 1], "int64")
        rows = paddle.static.nn.embedding(words, [ROWS, WIDTH], is_sparse=is_sparse)
        scores = paddle.static.nn.fc(paddle.sum(rows, axis=1), CLASSES)
        return paddle.mean(F.softmax_with_cross_entropy(scores, label))

    return network


def matrix_factorisation():
    """A rating is the product of a user's row and an item's."""
    user = paddle.static.data("user", [None], "int64")
    item = paddle.static.data("item", [None], "int64")
    rating = paddle.static.data("rating", [None], "float32")
    users = paddle.static.nn.embedding(user, [ROWS, WIDTH], is_sparse=True)
    items = paddle.static.nn.embedding(item, [ROWS, WIDTH], is_sparse=True)
    product = paddle.sum(users * items, axis=1)
    return paddle.mean(F.square_error_cost(product, rating))


def wide_deep():
    """Rows of each field and numbers, deep, and one weight per row, wide; against a click."""
    numbers = paddle.static.data("numbers", [None, NUMBERS], "float32")
    click = paddle.static.data("click", [None, 1], "float32")
    deep, wide = [numbers], []
    for field in range(FIELDS):
        ids = paddle.static.data(f"field{field}", [None], "int64")
        deep.append(paddle.static.nn.embedding(ids, [ROWS, WIDTH], is_sparse=True))
        wide.append(paddle.static.nn.embedding(ids, [ROWS, 1], is_sparse=True))
    hidden = paddle.static.nn.fc(paddle.concat(deep, axis=1), HIDDEN, activation="sigmoid")
    scores = paddle.add_n(wide + [paddle.static.nn.fc(hidden, 1)])
    return paddle.mean(F.binary_cross_entropy_with_logits(scores, click, reduction="none"))


def functions():
    """Differences, quotients, roots and others, with operands that repeat on either side."""
    x = paddle.static.data("pixels", [None, PIXELS], "float32")
    y = paddle.static.nn.fc(x, PIXELS)
    scale = paddle.static.create_parameter([PIXELS], "float32", name="scale")
    root = paddle.sqrt(paddle.abs(y - scale) + paddle.exp(y * scale))
    least = paddle.minimum(paddle.maximum(root / paddle.exp(scale), x), paddle.log(paddle.exp(y)))
    return paddle.mean(F.square_error_cost(least, x))


def shapes():
    """Reshapes, transposes and softmax in between layers, and two axes that stay."""
    numbers = paddle.static.data("numbers", [None, 12], "float32")
    target = paddle.static.data("target", [None, CLASSES], "float32")
    hidden = paddle.reshape(paddle.nn.Linear(12, 12)(numbers), [0, 3, 4])
    weights = F.softmax(paddle.transpose(hidden, [0, 2, 1]))
    hidden = paddle.flatten(weights * paddle.transpose(paddle.reshape(numbers, [-1, 3, 4]), [0, 2, 1]), 1)
    hidden = paddle.squeeze(paddle.unsqueeze(hidden, [1, 3]), [1, 3])
    hidden = hidden / paddle.sum(paddle.exp(hidden), axis=1, keepdim=True)
    hidden = hidden - paddle.mean(hidden, axis=-1, keepdim=True)
    scores = F.log_softmax(paddle.nn.Linear(12, CLASSES)(hidden))
    return paddle.mean(paddle.sum(F.square_error_cost(scores, target), axis=[1]))


def lenet():
    """Convolutions with a bias, pools, and a layer on the flat rest, with the classes' accuracy."""
    image = paddle.static.data("image", [None, 1, 8, 8], "float32")
    label = paddle.static.data("label", [None, 1], "int64")
    hidden = paddle.static.nn.conv2d(image, 3, 3, padding=1, act="relu")
    hidden = F.max_pool2d(hidden, 2)
    hidden = F.relu(paddle.nn.Conv2D(3, 4, (3, 2), stride=(1, 2), padding=(1, 0))(hidden))
    pooled = F.avg_pool2d(hidden, 2, stride=1, padding=1, exclusive=True)
    wide = F.adaptive_avg_pool2d(hidden, 1)
    hidden = paddle.concat([paddle.flatten(pooled, 1), paddle.flatten(wide, 1)], axis=1)
    scores = paddle.static.nn.fc(hidden, CLASSES)
    paddle.static.accuracy(F.softmax(scores), label)
    return paddle.mean(F.softmax_with_cross_entropy(scores, label))


def pooled():
    """A convolution without bias, whose output a static fc takes as rows, and labels of one dimension."""
    image = paddle.static.data("image", [None, 2, 5, 6], "float32")
    label = paddle.static.data("label", [None], "int64")
    hidden = F.tanh(paddle.nn.Conv2D(2, 3, 2, bias_attr=False)(image))
    hidden = F.avg_pool2d(hidden, (2, 3), stride=(2, 1))
    return F.cross_entropy(paddle.static.nn.fc(hidden, CLASSES), label)


def normalised():
    """Normalised layers, over one dimension and over two, with both forms of gelu."""
    numbers = paddle.static.data("numbers", [None, 12], "float32")
    target = paddle.static.data("target", [None, 1], "float32")
    hidden = F.gelu(paddle.nn.LayerNorm(6, epsilon=1e-3)(paddle.nn.Linear(12, 6)(numbers)))
    hidden = paddle.reshape(paddle.nn.Linear(6, 6)(hidden), [-1, 2, 3])
    hidden = F.gelu(paddle.nn.LayerNorm([2, 3])(hidden), approximate=True)
    return F.mse_loss(paddle.nn.Linear(6, 1)(paddle.flatten(hidden, 1)), target)


def activations():
    """Functions with bounds and constants: slopes at zero and at bounds among them."""
    x = paddle.static.data("numbers", [None, 6], "float32")
    target = paddle.static.data("target", [None, 6], "float32")
    y = F.leaky_relu(paddle.nn.Linear(6, 6)(x), 0.2)
    y = paddle.nn.Linear(6, 6)(F.relu6(y * 8.0))
    y = paddle.clip(y, -0.75, 0.5) + F.silu(2.0 * y + 1.0)
    y = paddle.nn.Linear(6, 6)(paddle.scale(y, 0.5, 0.25, bias_after_scale=False))
    return paddle.mean(paddle.pow(paddle.abs(y - target) + 0.1, 1.5)) + 0.01 * paddle.mean(F.relu(x))


def parts():
    """Slices from both ends, single columns, and rows by number."""
    x = paddle.static.data("numbers", [None, 7], "float32")
    rows = paddle.static.data("rows", [None], "int64")
    hidden = paddle.nn.Linear(7, 8)(x)
    left, right, last = hidden[:, :4], hidden[:, -4:], hidden[:, 7]
    memory = paddle.static.create_parameter([ROWS, 4], "float32", name="memory")
    met = paddle.sum(left * right * paddle.gather(memory, rows), axis=1)
    cube = paddle.slice(paddle.reshape(hidden, [-1, 2, 4]), [1, 2], [0, 1], [1, 100])
    return paddle.mean(paddle.square(met + last)) + paddle.mean(paddle.square(cube))


def padded(is_sparse):
    """Words' rows, of which the padding's is zero, averaged with attention over their scores."""

    def network():
        words = paddle.static.data("words", [None, WORDS], "int64")
        label = paddle.static.data("label", [None, 1], "int64")
        rows = paddle.static.nn.embedding(words, [ROWS, WIDTH], is_sparse=is_sparse, padding_idx=2)
        weights = F.softmax(paddle.sum(rows, axis=2))
        mixed = paddle.sum(rows * paddle.unsqueeze(weights, [2]), axis=1)
        return paddle.mean(F.softmax_with_cross_entropy(paddle.static.nn.fc(mixed, CLASSES), label))

    return network


def ranking():
    """Pairs: the first item's score above the second's by a margin. Both share a table and a layer."""
    user = paddle.static.data("user", [None, 1], "int64")
    pair = [paddle.static.data(name, [None], "int64") for name in ("good", "bad")]
    users = paddle.squeeze(paddle.nn.Embedding(ROWS, WIDTH, sparse=True)(user), [1])
    items, layer = paddle.nn.Embedding(ROWS, WIDTH, sparse=True), paddle.nn.Linear(WIDTH, WIDTH)
    good, bad = [paddle.sum(users * F.tanh(layer(items(ids))), axis=1, keepdim=True) for ids in pair]
    return paddle.mean(F.relu(1.0 - (good - bad)))


def experts():
    """Layers weighed by a gate of softmax: two tasks of one body."""
    numbers = paddle.static.data("numbers", [None, 5], "float32")
    click = paddle.static.data("click", [None, 1], "float32")
    target = paddle.static.data("target", [None, 1], "float32")
    experts = [F.relu(paddle.nn.Linear(5, HIDDEN)(numbers)) for _ in range(3)]
    losses = []
    for task in range(2):
        gate = paddle.split(F.softmax(paddle.nn.Linear(5, 3)(numbers)), 3, axis=1)
        score = paddle.nn.Linear(HIDDEN, 1)(paddle.add_n([one * share for one, share in zip(experts, gate)]))
        losses.append(
            F.binary_cross_entropy_with_logits(score, click) if task == 0 else F.mse_loss(score, target)
        )
    return losses[0] + 0.5 * losses[1]


def autoencoder():
    """A bottleneck whose second layer is the first one transposed."""
    x = paddle.static.data("pixels", [None, PIXELS], "float32")
    weight = paddle.static.create_parameter([PIXELS, 2], "float32", name="weight")
    shift = paddle.static.create_parameter([PIXELS], "float32", name="shift", is_bias=True)
    hidden = F.sigmoid(paddle.matmul(x, weight))
    return F.mse_loss(paddle.matmul(hidden, weight, transpose_y=True) + shift, x, reduction="sum")


def factorisation_machine():
    """Pairs of fields by half of the square of the sum less the sum of squares."""
    fields = paddle.static.data("fields", [None, WORDS], "int64")
    click = paddle.static.data("click", [None, 1], "float32")
    rows = paddle.nn.Embedding(ROWS, WIDTH, sparse=True)(fields)
    first = paddle.sum(paddle.nn.Embedding(ROWS, 1, sparse=True)(fields), axis=1)
    both = paddle.square(paddle.sum(rows, axis=1)) - paddle.sum(paddle.square(rows), axis=1)
    score = first + 0.5 * paddle.sum(both, axis=1, keepdim=True)
    return F.binary_cross_entropy_with_logits(score, click)


def bounded():
    """Functions with one bound or two, and others of few ops."""
    numbers = paddle.static.data("numbers", [None, 6], "float32")
    target = paddle.static.data("target", [None, 1], "float32")
    x = paddle.static.nn.fc(numbers, HIDDEN)
    y = paddle.clip(x, min=-0.5) + paddle.clip(x, max=0.25) + F.hardtanh(x)
    y = y + paddle.assign(x) * paddle.sign(x) + F.swish(x) + F.tanhshrink(x)
    y = paddle.rsqrt(paddle.square(y) + 1.0) + paddle.reciprocal(F.relu(y) + 2.0)
    return F.mse_loss(paddle.static.nn.fc(y, 1), target)


def own_rates():
    """A layer whose weight has half of the learning rate."""
    numbers = paddle.static.data("numbers", [None, 6], "float32")
    target = paddle.static.data("target", [None, 1], "float32")
    hidden = paddle.static.nn.fc(numbers, HIDDEN, weight_attr=paddle.ParamAttr(learning_rate=0.3), activation="tanh")
    return F.mse_loss(paddle.static.nn.fc(hidden, 1), target)


def dropout():
    """Layers with elements dropped, in both forms; the losses are those without."""
    numbers = paddle.static.data("numbers", [None, 6], "float32")
    target = paddle.static.data("target", [None, 1], "float32")
    hidden = F.dropout(F.tanh(paddle.nn.Linear(6, HIDDEN)(numbers)), 0.25)
    hidden = F.dropout(F.tanh(paddle.nn.Linear(HIDDEN, HIDDEN)(hidden)), 0.5, mode="downscale_in_infer")
    return F.mse_loss(paddle.nn.Linear(HIDDEN, 1)(hidden), target)


O = paddle.optimizer
PROGRAMS = {
    "fc_sgd": (fc, lambda: O.SGD(0.1)),
    "fc_momentum": (fc, lambda: O.Momentum(0.1, momentum=0.9)),
    "fc_nesterov": (fc, lambda: O.Momentum(0.1, 0.9, use_nesterov=True, weight_decay=paddle.regularizer.L2Decay(0.01))),
    "linear_adam": (linear, lambda: O.Adam(0.05)),
    "fc_adamw": (fc, lambda: O.AdamW(0.05, weight_decay=0.1)),
    "fc_adam_l2": (fc, lambda: O.Adam(0.05, weight_decay=paddle.regularizer.L2Decay(0.1))),
    "fc_sgd_l2": (fc, lambda: O.SGD(0.1, weight_decay=paddle.regularizer.L2Decay(0.1))),
    "embedding_dense_clip": (
        embedding(False),
        lambda: O.Adam(0.05, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.3)),
    ),
    "embedding_sparse_clip": (
        embedding(True),
        lambda: O.SGD(0.5, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.3)),
    ),
    "fc_adamw_clip": (fc, lambda: O.AdamW(0.05, weight_decay=0.1, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.2))),
    "embedding_sparse_sgd": (embedding(True), lambda: O.SGD(0.1)),
    "embedding_dense_sgd": (embedding(False), lambda: O.SGD(0.1)),
    "embedding_sparse_adagrad": (embedding(True), lambda: O.Adagrad(0.1, initial_accumulator_value=0.1)),
    "embedding_dense_adagrad": (embedding(False), lambda: O.Adagrad(0.1)),
    "embedding_dense_adam": (embedding(False), lambda: O.Adam(0.05)),
    "embedding_sparse_adam": (embedding(True), lambda: O.Adam(0.05)),
    "embedding_lazy_adam": (embedding(True), lambda: O.Adam(0.05, lazy_mode=True)),
    "matrix_factorisation": (matrix_factorisation, lambda: O.SGD(0.1)),
    "functions": (functions, lambda: O.SGD(0.1)),
    "wide_deep": (wide_deep, lambda: O.Adagrad(0.1)),
    "shapes": (shapes, lambda: O.SGD(0.05)),
    "lenet": (lenet, lambda: O.Momentum(0.05, 0.9)),
    "pooled": (pooled, lambda: O.Adam(0.02)),
    "normalised": (normalised, lambda: O.SGD(0.05)),
    "activations": (activations, lambda: O.SGD(0.02)),
    "parts": (parts, lambda: O.Momentum(0.02, 0.9)),
    "padded_sparse": (padded(True), lambda: O.SGD(0.2)),
    "padded_dense": (padded(False), lambda: O.Adam(0.05)),
    "ranking": (ranking, lambda: O.Adagrad(0.05)),
    "experts": (experts, lambda: O.AdamW(0.02, weight_decay=0.1)),
    "bounded": (bounded, lambda: O.SGD(0.05)),
    "own_rates": (own_rates, lambda: O.Adam(0.05)),
    "dropout": (dropout, lambda: O.SGD(0.0)),
    "autoencoder": (autoencoder, lambda: O.SGD(0.01)),
    "factorisation_machine": (factorisation_machine, lambda: O.Adagrad(0.1)),
}



def refused(change):
    """A network of two layers with something that has no counterpart between them."""

    def network():
        pixels = paddle.static.data("pixels", [None, PIXELS], "float32")
        label = paddle.static.data("label", [None, 1], "int64")
        hidden = change(paddle.static.nn.fc(pixels, HIDDEN))
        return paddle.mean(F.softmax_with_cross_entropy(paddle.static.nn.fc(hidden, CLASSES), label))

    return network


def stopped(hidden):
    hidden = paddle.tanh(hidden)
    hidden.stop_gradient = True
    return hidden


def frozen(hidden):
    return paddle.static.nn.fc(hidden, HIDDEN, weight_attr=paddle.ParamAttr(trainable=False))


def looped(hidden):
    return paddle.static.nn.cond(paddle.mean(hidden) > 0, lambda: hidden * 2.0, lambda: hidden)


def sequence(hidden):
    """A layer on each of several rows of an example."""
    return paddle.mean(paddle.nn.Linear(2, HIDDEN)(paddle.reshape(hidden, [-1, 2, 2])), axis=1)


# Only the two programs are written.
REFUSED = {
    "refused_norm": (refused(lambda hidden: paddle.nn.BatchNorm1D(HIDDEN)(hidden)), lambda: O.SGD(0.1)),
    "refused_sequence": (refused(sequence), lambda: O.SGD(0.1)),
    "refused_scale": (refused(lambda hidden: paddle.nn.LayerNorm(HIDDEN, weight_attr=False)(hidden)), lambda: O.SGD(0.1)),
    "refused_axis": (refused(lambda hidden: F.softmax(hidden, axis=0)), lambda: O.SGD(0.1)),
    "refused_stop_gradient": (refused(stopped), lambda: O.SGD(0.1)),
    "refused_frozen": (refused(frozen), lambda: O.SGD(0.1)),
    "refused_branch": (refused(looped), lambda: O.SGD(0.1)),
    "refused_padding": (
        padded(True),
        lambda: O.SGD(0.1, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.2)),
    ),
    "refused_rmsprop": (fc, lambda: O.RMSProp(0.1)),
}

LIMITS = {"label": CLASSES}


def fed(program, random):
    """A value for each variable that is fed."""
    values = {}
    for variable in program.global_block().vars.values():
        if not variable.desc.need_check_feed():
            continue
        shape = [BATCH if length < 0 else length for length in variable.shape]
        if variable.dtype == paddle.int64:
            values[variable.name] = random.integers(0, LIMITS.get(variable.name, ROWS), shape)
        elif variable.name == "click":
            values[variable.name] = random.integers(0, 2, shape).astype("float32")
        else:
            values[variable.name] = random.standard_normal(shape).astype("float32")
    return values


def stripped(program):
    """The program's bytes without the places in Python that its ops come from."""
    message = framework_pb2.ProgramDesc()
    message.ParseFromString(program.desc.serialize_to_string())
    for block in message.blocks:
        for op in block.ops:
            kept = [attribute for attribute in op.attrs if attribute.name != "op_callstack"]
            del op.attrs[:]
            op.attrs.extend(kept)
    return message.SerializeToString()


def tensor(value):
    """A tensor in JSON. A float's digits are those of its exact value in binary64."""
    value = np.asarray(value)
    return {"shape": list(value.shape), "type": str(value.dtype), "values": value.flatten().tolist()}


def build(name, network, optimizer):
    """The main and the startup program, which are written, and the loss."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.utils.unique_name.guard(), paddle.static.program_guard(main, startup):
        loss = network()
        optimizer().minimize(loss)
    for part, program in (("main", main), ("startup", startup)):
        with open(os.path.join(HERE, f"{name}.{part}.pb"), "wb") as file:
            file.write(stripped(program))
    return main, startup, loss


def make(name, network, optimizer):
    main, startup, loss = build(name, network, optimizer)
    parameters = [parameter.name for parameter in main.all_parameters()]
    scope = paddle.static.Scope()
    with paddle.static.scope_guard(scope):
        executor = paddle.static.Executor(paddle.CPUPlace())
        paddle.seed(1)
        executor.run(startup)
        values = lambda: {each: tensor(scope.find_var(each).get_tensor()) for each in parameters}
        result = {"loss": loss.name, "before": values(), "feeds": [], "losses": []}
        random = np.random.default_rng(7)
        run = main.clone(for_test=True) if name == "dropout" else main
        for _ in range(STEPS):
            feed = fed(main, random)
            result["feeds"].append({each: tensor(value) for each, value in feed.items()})
            result["losses"].append(float(np.asarray(executor.run(run, feed=feed, fetch_list=[loss.name])[0]).reshape(())))
        result["after"] = values()
    with open(os.path.join(HERE, f"{name}.json"), "w") as file:
        json.dump(result, file, separators=(",", ":"))
        file.write("\n")
    print(name, [op.type for op in main.global_block().ops], result["losses"])


if __name__ == "__main__":
    paddle.enable_static()
    wanted = lambda name: len(sys.argv) < 2 or name in sys.argv[1:]
    for name, (network, optimizer) in PROGRAMS.items():
        if wanted(name):
            make(name, network, optimizer)
    for name, (network, optimizer) in REFUSED.items():
        if wanted(name):
            build(name, network, optimizer)
