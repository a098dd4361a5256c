"""Programs of PaddlePaddle 2.6.2 with its own results: the data of `program/tests/imports.rs`.

    sh bench/peers/install.sh paddle /tmp/kits
    /tmp/kits/paddle/bin/python program/tests/paddle/make.py

writes, beside itself, for each program NAME.main.pb and NAME.startup.pb (ProgramDesc without call stacks) and
NAME.json: the parameters before and after five steps, the values that were fed, and the losses.
"""

import json
import os

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


O = paddle.optimizer
PROGRAMS = {
    "fc_sgd": (fc, lambda: O.SGD(0.1)),
    "fc_momentum": (fc, lambda: O.Momentum(0.1, momentum=0.9)),
    "fc_nesterov": (fc, lambda: O.Momentum(0.1, 0.9, use_nesterov=True, weight_decay=paddle.regularizer.L2Decay(0.01))),
    "linear_adam": (linear, lambda: O.Adam(0.05)),
    "fc_adamw": (fc, lambda: O.AdamW(0.05, weight_decay=0.1)),
    "fc_adam_l2": (fc, lambda: O.Adam(0.05, weight_decay=paddle.regularizer.L2Decay(0.1))),
    "fc_sgd_l2": (fc, lambda: O.SGD(0.1, weight_decay=paddle.regularizer.L2Decay(0.1))),
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


def padded():
    words = paddle.static.data("words", [None], "int64")
    label = paddle.static.data("label", [None, 1], "int64")
    rows = paddle.static.nn.embedding(words, [ROWS, CLASSES], padding_idx=0)
    return paddle.mean(F.softmax_with_cross_entropy(rows, label))


# Only the two programs are written.
REFUSED = {
    "refused_dropout": (refused(lambda hidden: F.dropout(hidden, 0.5)), lambda: O.SGD(0.1)),
    "refused_stop_gradient": (refused(stopped), lambda: O.SGD(0.1)),
    "refused_frozen": (refused(frozen), lambda: O.SGD(0.1)),
    "refused_branch": (refused(looped), lambda: O.SGD(0.1)),
    "refused_padding": (padded, lambda: O.SGD(0.1)),
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
        for _ in range(STEPS):
            feed = fed(main, random)
            result["feeds"].append({each: tensor(value) for each, value in feed.items()})
            result["losses"].append(float(np.asarray(executor.run(main, feed=feed, fetch_list=[loss])[0]).reshape(())))
        result["after"] = values()
    with open(os.path.join(HERE, f"{name}.json"), "w") as file:
        json.dump(result, file, separators=(",", ":"))
        file.write("\n")
    print(name, [op.type for op in main.global_block().ops], result["losses"])


if __name__ == "__main__":
    paddle.enable_static()
    for name, (network, optimizer) in PROGRAMS.items():
        make(name, network, optimizer)
    for name, (network, optimizer) in REFUSED.items():
        build(name, network, optimizer)
