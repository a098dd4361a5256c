"""Data of the programs in docs/programs, and what NumPy computes for them: the data of cli/tests/train_examples.rs.

    python3 -m venv /tmp/numpy && /tmp/numpy/bin/pip install numpy==2.4.6
    /tmp/numpy/bin/python cli/tests/numpy/make.py

writes the data, docs/programs/*.npz, and beside itself for each program NAME.npz: the losses of 50 steps and the
parameters after them, in float64 (of some programs also by other optimizers). Of a large table the rows that were
looked up are written, and their numbers as `TABLE@rows`. The forward pass and the optimizer of each program are written
here by hand; names, shapes and initial values are read from the program. Gradients are checked by central differences first.
"""

import gzip
import os
import re
from statistics import NormalDist

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAMS = os.path.join(HERE, "../../../docs/programs")
STEPS = 50
BATCH = 32
ROWS = 320
TABLE_ROWS_MAX = 1000
MASK = (1 << 64) - 1


# Reverse-mode differentiation.


class Value:
    """An array, and how its gradient goes to what it was computed from."""

    def __init__(self, array, parents=()):
        self.array = np.asarray(array, dtype=np.float64)
        self.parents = parents
        self.gradient = np.zeros_like(self.array)


def backward(loss):
    order, seen = [], set()

    def visit(value):
        if id(value) not in seen:
            seen.add(id(value))
            for parent, _ in value.parents:
                visit(parent)
            order.append(value)

    visit(loss)
    loss.gradient = np.ones_like(loss.array)
    for value in reversed(order):
        for parent, slope in value.parents:
            parent.gradient += slope(value.gradient)


def fitted(gradient, shape):
    """The sum over the dimensions that were repeated to come from `shape`."""
    gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    repeated = tuple(i for i, length in enumerate(shape) if length == 1 and gradient.shape[i] != 1)
    return gradient.sum(axis=repeated, keepdims=True)


def add(*terms):
    parents = [(term, lambda g, shape=term.array.shape: fitted(g, shape)) for term in terms]
    return Value(sum(term.array for term in terms), parents)


def sub(a, b):
    return Value(a.array - b.array, [(a, lambda g: g), (b, lambda g: -g)])


def mul(a, b):
    return Value(a.array * b.array, [(a, lambda g: g * b.array), (b, lambda g: g * a.array)])


def matmul(a, b):
    return Value(a.array @ b.array, [(a, lambda g: g @ b.array.T), (b, lambda g: a.array.T @ g)])


def pointwise(array, x, slope):
    return Value(array, [(x, lambda g: g * slope)])


def relu(x):
    return pointwise(np.maximum(x.array, 0), x, x.array > 0)


def tanh(x):
    y = np.tanh(x.array)
    return pointwise(y, x, 1 - y * y)


def sigmoid(x):
    y = 1 / (1 + np.exp(-x.array))
    return pointwise(y, x, y * (1 - y))


def reshape(x, *shape):
    return Value(x.array.reshape(shape), [(x, lambda g: g.reshape(x.array.shape))])


def mean(x):
    return Value(x.array.mean(), [(x, lambda g: np.full_like(x.array, g / x.array.size))])


def sum_over(x, axis):
    parents = [(x, lambda g: np.broadcast_to(np.expand_dims(g, axis), x.array.shape))]
    return Value(x.array.sum(axis=axis), parents)


def concat(*parts):
    widths = np.cumsum([0] + [part.array.shape[1] for part in parts])
    parents = [
        (part, lambda g, low=low, high=high: g[:, low:high]) for part, low, high in zip(parts, widths, widths[1:])
    ]
    return Value(np.concatenate([part.array for part in parts], axis=1), parents)


def lookup(table, ids, padding=None):
    rows = table.array[ids]
    if padding is not None:
        rows[ids == padding] = 0

    def slope(g):
        whole = np.zeros_like(table.array)
        np.add.at(whole, ids, g)
        if padding is not None:
            whole[padding] = 0
        return whole

    return Value(rows, [(table, slope)])


def conv2d_3x3(x, filters):
    """Padded by one zero on each side, with steps of one."""
    n, _, h, w = x.array.shape
    padded = np.pad(x.array, ((0, 0), (0, 0), (1, 1), (1, 1)))
    places = [(i, j) for i in range(3) for j in range(3)]
    y = sum(np.einsum("nchw,oc->nohw", padded[:, :, i : i + h, j : j + w], filters.array[:, :, i, j]) for i, j in places)

    def to_filters(g):
        whole = np.zeros_like(filters.array)
        for i, j in places:
            whole[:, :, i, j] = np.einsum("nchw,nohw->oc", padded[:, :, i : i + h, j : j + w], g)
        return whole

    def to_x(g):
        whole = np.zeros_like(padded)
        for i, j in places:
            whole[:, :, i : i + h, j : j + w] += np.einsum("nohw,oc->nchw", g, filters.array[:, :, i, j])
        return whole[:, :, 1:-1, 1:-1]

    return Value(y, [(x, to_x), (filters, to_filters)])


def max_pool_2x2(x):
    n, c, h, w = x.array.shape
    windows = x.array.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, c, h // 2, w // 2, 4)
    largest = windows.argmax(axis=-1)

    def slope(g):
        whole = np.where(np.arange(4) == largest[..., None], g[..., None], 0.0)
        return whole.reshape(n, c, h // 2, w // 2, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, c, h, w)

    return Value(windows.max(axis=-1), [(x, slope)])


def softmax_cross_entropy(scores, label):
    shifted = scores.array - scores.array.max(axis=1, keepdims=True)
    logarithms = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    one_hot = np.eye(scores.array.shape[1])[label]
    return Value(-(logarithms * one_hot).sum(axis=1), [(scores, lambda g: g[:, None] * (np.exp(logarithms) - one_hot))])


def sigmoid_cross_entropy(score, label):
    x = score.array
    losses = np.maximum(x, 0) - x * label + np.log1p(np.exp(-np.abs(x)))
    return Value(losses, [(score, lambda g: g * (1 / (1 + np.exp(-x)) - label))])


# Optimizers, by the formulas of docs/CAPI.md. `n` is the number of the update, from 1.


def momentum(rate, mu, nesterov=False):
    def update(w, g, n, state):
        v = state["v"] = mu * state.get("v", 0.0) - rate * g
        return w + (mu * v - rate * g if nesterov else v)

    return update


def adam(rate, decay=0.0, beta_1=0.9, beta_2=0.999, epsilon=1e-8):
    def update(w, g, n, state):
        m = state["m"] = beta_1 * state.get("m", 0.0) + (1 - beta_1) * g
        v = state["v"] = beta_2 * state.get("v", 0.0) + (1 - beta_2) * g * g
        w = w - rate * decay * w
        return w - rate * (m / (1 - beta_1**n)) / (np.sqrt(v / (1 - beta_2**n)) + epsilon)

    return update


def adagrad(rate, epsilon=1e-5):
    def update(w, g, n, state):
        s = state["s"] = state.get("s", 0.0) + g * g
        return w - rate * g / np.sqrt(s + epsilon)

    return update


def rmsprop(rate, rho=0.9, epsilon=1e-5):
    def update(w, g, n, state):
        s = state["s"] = rho * state.get("s", 0.0) + (1 - rho) * g * g
        return w - rate * g / np.sqrt(s + epsilon)

    return update


def poly_sgd_l2(rate, a, b, l2):
    def update(w, g, n, state):
        return w - rate * (1 + a * n) ** -b * (g + l2 * w)

    return update


def lamb(rate, beta_1=0.9, beta_2=0.999, epsilon=1e-6, decay=0.01):
    def update(w, g, n, state):
        m = state["m"] = beta_1 * state.get("m", 0.0) + (1 - beta_1) * g
        v = state["v"] = beta_2 * state.get("v", 0.0) + (1 - beta_2) * g * g
        s = (m / (1 - beta_1**n)) / (np.sqrt(v / (1 - beta_2**n)) + epsilon) + decay * w
        length, of_step = np.linalg.norm(w.ravel()), np.linalg.norm(s.ravel())
        return w - rate * (length / of_step if length > 0 and of_step > 0 else 1.0) * s

    return update


def lars(rate, share, mu=0.9, decay=0.0):
    def update(w, g, n, state):
        length, of_gradient = np.linalg.norm(w.ravel()), np.linalg.norm(g.ravel())
        trust = share * length / (of_gradient + decay * length) if length > 0 and of_gradient > 0 else 1.0
        v = state["v"] = mu * state.get("v", 0.0) + rate * trust * (g + decay * w)
        return w - v

    return update


def clipped(slopes, limit):
    """Gradients that are scaled to this norm of all of them together where it is larger."""
    norm = np.sqrt(sum((slope**2).sum() for slope in slopes.values()))
    return {name: slope * (limit / max(limit, norm)) for name, slope in slopes.items()}


# Forward passes: parameters and a batch to the loss.


def mlp(p, d):
    hidden = relu(add(matmul(Value(d["pixels"] * 0.0625), p["layer1/weight"]), p["layer1/bias"]))
    scores = add(matmul(hidden, p["layer2/weight"]), p["layer2/bias"])
    return mean(softmax_cross_entropy(scores, d["label"]))


def cnn(p, d):
    picture = Value(d["pixels"].reshape(-1, 1, 8, 8) * 0.0625)
    features = relu(add(conv2d_3x3(picture, p["filter"]), p["filter/bias"]))
    flat = reshape(max_pool_2x2(features), -1, 96)
    return mean(softmax_cross_entropy(add(matmul(flat, p["weight"]), p["bias"]), d["label"]))


def autoencoder(p, d):
    darkness = Value(d["pixels"] * 0.0625)
    code = tanh(add(matmul(darkness, p["encoder"]), p["encoder/bias"]))
    difference = sub(sigmoid(add(matmul(code, p["decoder"]), p["decoder/bias"])), darkness)
    return mean(mul(difference, difference))


def logistic_regression(p, d):
    score = reshape(add(matmul(Value(d["numbers"]), p["weight"]), p["bias"]), -1)
    return mean(sigmoid_cross_entropy(score, d["clicked"]))


def pooled_embedding(p, d):
    basket = sum_over(lookup(p["item"], d["items"]), 1)
    score = reshape(add(matmul(basket, p["weight"]), p["bias"]), -1)
    return mean(sigmoid_cross_entropy(score, d["bought"]))


def text_classifier(p, d):
    total = sum_over(lookup(p["word"], d["words"], padding=0), 1)
    average = mul(total, Value(np.broadcast_to(1 / d["length"], total.array.shape)))
    return mean(softmax_cross_entropy(add(matmul(average, p["weight"]), p["bias"]), d["topic"]))


def matrix_factorisation(p, d):
    match = sum_over(mul(lookup(p["user/factors"], d["user"]), lookup(p["film/factors"], d["film"])), 1)
    mood, quality = lookup(p["user/bias"], d["user"]), lookup(p["film/bias"], d["film"])
    difference = sub(add(match, reshape(mood, -1), reshape(quality, -1)), Value(d["rating"]))
    return mean(mul(difference, difference))


def wide_and_deep(p, d):
    fields = ["site", "device", "topic"]
    wide = [lookup(p["wide/" + field], d[field]) for field in fields]
    features = concat(*[lookup(p["deep/" + field], d[field]) for field in fields], Value(d["numbers"]))
    deep = matmul(relu(add(matmul(features, p["layer1/weight"]), p["layer1/bias"])), p["layer2/weight"])
    return mean(sigmoid_cross_entropy(reshape(add(*wide, deep, p["bias"]), -1), d["clicked"]))


TRAININGS = [
    (mlp, "digits", momentum(0.1, 0.9)),
    (cnn, "digits", adam(0.01)),
    (autoencoder, "digits", adam(0.005, decay=0.01)),
    (logistic_regression, "clicks", poly_sgd_l2(0.5, 0.01, 0.5, 0.001)),
    (pooled_embedding, "baskets", adagrad(0.1)),
    (text_classifier, "texts", rmsprop(0.02)),
    (matrix_factorisation, "ratings", adam(0.02)),
    (wide_and_deep, "clicks", momentum(0.05, 0.9, nesterov=True)),
    (mlp, "digits", lamb(0.02), "mlp_lamb"),
    (mlp, "digits", lars(0.1, 0.05), "mlp_lars"),
    (text_classifier, "texts", momentum(0.5, 0.9), "text_classifier_clipped", 0.15),
]


# Initial values, as the ops `fill`, `uniform` and `gaussian` define them.


def mix(value):
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


def fraction(seed, row, place):
    """A number above 0 and below 1 from the upper 52 bits of the element's hash."""
    bits = mix((mix((mix(seed) + row) & MASK) + place) & MASK)
    return ((bits >> 12) + 0.5) * 2.0**-52


def initial(kind, settings, shape):
    settings = {key: float(value) for key, value in re.findall(r"(\w+)=([^,)]+)", settings)}
    if kind == "fill":
        return np.full(shape, settings["value"], dtype=np.float32).astype(np.float64)
    width = int(np.prod(shape[1:]))
    seed = int(settings["seed"])
    shares = (fraction(seed, row, place) for row in range(shape[0]) for place in range(width))
    if kind == "uniform":
        values = [settings["low"] * (1 - share) + settings["high"] * share for share in shares]
    else:
        normal = NormalDist(settings["mean"], settings["deviation"])
        values = [normal.inv_cdf(share) for share in shares]
    # The program's parameters are float32.
    return np.array(values).reshape(shape).astype(np.float32).astype(np.float64)


def parameters(name):
    with open(os.path.join(PROGRAMS, name + ".program")) as file:
        text = file.read()
    shapes = dict(re.findall(r"^ *parameter (\S+): float32\[(.*)\]$", text, re.MULTILINE))
    ops = {each[0]: each[1:] for each in re.findall(r"^ *initialise (\S+) = (\w+)\((.*)\)$", text, re.MULTILINE)}
    return {key: initial(*ops[key], [int(length) for length in shape.split(",")]) for key, shape in shapes.items()}


# Training.


def gradients(network, values, batch):
    tracked = {name: Value(array) for name, array in values.items()}
    loss = network(tracked, batch)
    backward(loss)
    return float(loss.array), {name: value.gradient for name, value in tracked.items()}


def check_gradients(network, values, batch):
    """Central differences of the elements with the largest slopes."""
    _, slopes = gradients(network, values, batch)
    for name, slope in slopes.items():
        place = np.unravel_index(np.abs(slope).argmax(), slope.shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = {key: array.copy() for key, array in values.items()}
            moved[name][place] += step
            ends.append(gradients(network, moved, batch)[0])
        found = (ends[0] - ends[1]) / 2e-5
        assert abs(found - slope[place]) < 1e-6 * max(1, abs(found)), (network.__name__, name, found, slope[place])


def train(network, data, update, results_name=None, limit=None):
    values = parameters(network.__name__)
    states = {name: {} for name in values}
    touched = {name: np.zeros(len(array), dtype=bool) for name, array in values.items()}
    losses = []
    for step in range(STEPS):
        first = step * BATCH % ROWS
        batch = {name: column[first : first + BATCH] for name, column in data.items()}
        if step == 0:
            check_gradients(network, values, batch)
        loss, slopes = gradients(network, values, batch)
        losses.append(loss)
        if limit is not None:
            slopes = clipped(slopes, limit)
        for name, slope in slopes.items():
            touched[name] |= slope.reshape(len(slope), -1).any(axis=1)
            values[name] = update(values[name], slope, step + 1, states[name])
    results = {"losses": np.array(losses)}
    for name, array in values.items():
        if len(array) > TABLE_ROWS_MAX:
            results[name + "@rows"] = np.flatnonzero(touched[name])
            array = array[touched[name]]
        results[name] = array
    name = results_name or network.__name__
    np.savez_compressed(os.path.join(HERE, name + ".npz"), **results)
    print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}")


# Data.


def digits():
    """Every fifth of the handwritten digits of cli/data, as bytes."""
    with gzip.open(os.path.join(HERE, "../../data/digits.csv.gz"), "rt") as file:
        rows = np.array([[int(number) for number in line.split(",")] for line in file if line.strip()])
    rows = rows[: 5 * ROWS : 5]
    return {"pixels": rows[:, :64].astype(np.uint8), "label": rows[:, 64].astype(np.uint8)}


def clicks(random):
    data = {name: random.integers(0, count, ROWS) for name, count in [("site", 200), ("device", 12), ("topic", 40)]}
    numbers = random.normal(size=(ROWS, 4))
    leaning = {name: random.normal(size=200)[data[name]] for name in data}
    score = sum(leaning.values()) + numbers @ [1.0, -0.5, 0.25, 0.0]
    clicked = random.random(ROWS) < 1 / (1 + np.exp(-score))
    data = {name: column.astype(np.int16) for name, column in data.items()}
    return {**data, "numbers": numbers.astype(np.float32), "clicked": clicked}


def baskets(random):
    # Some items of each third of the table are bought often.
    popular = np.concatenate([random.choice(20000, 30, replace=False) + third * 20000 for third in range(3)])
    chosen = random.integers(0, 90, (ROWS, 6))
    bought = random.normal(size=90)[chosen].sum(axis=1) > 0
    return {"items": popular[chosen].astype(np.uint16), "bought": bought}


def texts(random):
    topic = random.integers(0, 4, ROWS)
    length = random.integers(3, 13, ROWS)
    own = 1 + topic[:, None] * 20 + random.integers(0, 20, (ROWS, 12))
    any_word = random.integers(1, 500, (ROWS, 12))
    words = np.where(random.random((ROWS, 12)) < 0.5, own, any_word)
    words[np.arange(12) >= length[:, None]] = 0
    return {"words": words.astype(np.int32), "length": length.astype(np.float32)[:, None], "topic": topic}


def ratings(random):
    user, film = random.integers(0, 60, ROWS), random.integers(0, 90, ROWS)
    taste, style = random.normal(size=(60, 3)), random.normal(size=(90, 3))
    rating = np.clip(np.round(3 + (taste[user] * style[film]).sum(axis=1)), 1, 5)
    return {"user": user.astype(np.uint8), "film": film.astype(np.uint8), "rating": rating.astype(np.float16)}


def main():
    random = np.random.Generator(np.random.PCG64(1701))
    data = {"digits": digits()}
    for make in (clicks, baskets, texts, ratings):
        data[make.__name__] = make(random)
    for name, columns in data.items():
        np.savez_compressed(os.path.join(PROGRAMS, name + ".npz"), **columns)
    for network, name, update, *more in TRAININGS:
        # As the program converts them: a bool to 0 or 1, float16 exactly.
        columns = {key: column if column.dtype.kind in "iu" else column.astype(np.float64)
                   for key, column in data[name].items()}
        train(network, columns, update, *more)


if __name__ == "__main__":
    main()
