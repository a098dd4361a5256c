"""Rules by name, with PyTorch's settings, formulas and names of states, as configurations in text.

A configuration has the settings of the optimizer's construction. Those that a group has at a step, where they are
others, are carried by the step's gradients (:meth:`Rule.numbers`)."""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

import torch

from .._errors import Refused

Settings = dict[str, Any]
Made = tuple[str, dict[str, str]]
"""A configuration, and PyTorch's names of the rule's states by those that servers have."""


class Numbers(NamedTuple):
    """What gradients carry for the rule."""

    rate: float
    settings: dict[str, float]
    """Settings of the rule that differ from the configuration's, by the servers' names."""


class Rule(NamedTuple):
    """A rule with its settings."""

    name: str
    """One of :data:`RULES`, or a configuration in text."""
    settings: Settings
    """Those of PyTorch's optimizer, without the rate; none beside a configuration in text."""
    config: str
    """The configuration, without a rate."""
    states: dict[str, str] | None
    """PyTorch's names of the states by those that servers have. None: as a text names them."""

    @property
    def has_step(self) -> bool:
        """Whether a parameter's state counts updates. That of PyTorch's SGD does not."""
        return self.name != "sgd"

    @property
    def initial(self) -> float:
        """Elements of a state before the first update."""
        return float(self.settings.get("initial_accumulator_value", 0.0))

    @property
    def others(self) -> Settings:
        """Settings of PyTorch's optimizers that no rule here has, with the value that is this rule's formula."""
        return {"maximize": False, "decoupled_weight_decay": self.name == "adamw"} if self.settings else {}

    def numbers(self, group: Mapping[str, Any], when: str) -> Numbers:
        """What gradients carry with the settings of a group."""
        carried: dict[str, float] = {}
        for key, kept in {**self.others, **self.settings}.items():
            found = group.get(key, kept)
            if found == kept or (isinstance(found, list) and tuple(found) == kept):
                continue
            names = CARRIED[self.name].get(key) if self.name in CARRIED else None
            if names is None:
                text = "expected it, or an optimizer that is constructed with the other"
                raise Refused(f"{key} is {found} {when}, and servers keep {kept}; {text}")
            if kept == 0 and key in OPTIONAL and self.name != "lion":
                text = f"expected it, or an optimizer that is constructed with {key} above 0, which steps may change"
                raise Refused(f"{key} is {found} {when}, and the rule on servers has none; {text}")
            if found == 0 and key == "momentum":
                text = "expected a value above 0, as a rule without momentum keeps no state of it"
                raise Refused(f"{key} is {found} {when}, and servers keep {kept}; {text}")
            values = list(found) if isinstance(found, (tuple, list)) else [found]
            if len(values) != len(names) or not all(_is_number(value) for value in values):
                raise Refused(f"{key} is {found!r:.200} {when}; expected numbers of 0 or more, as {kept}")
            before = kept if isinstance(kept, (tuple, list)) else [kept]
            pairs = zip(names, before, values)
            carried.update({name: float(value) for name, earlier, value in pairs if value != earlier})
        return Numbers(float(group.get("lr", 0.0)), carried)

    def at_rate(self, rate: float) -> str:
        """The whole configuration."""
        return f"{self.config} const_lr {{ learning_rate: {float(rate)!r} }}"

    def state(self, name: str) -> str:
        """PyTorch's name of a state."""
        return name if self.states is None else self.states[name]


def rule_of(name: str, given: Settings) -> Rule:
    """The rule by its name, with the settings that differ from PyTorch's."""
    if not isinstance(name, str):
        kind = getattr(name, "__name__", type(name).__name__)
        known = kind.lower() if kind.lower() in RULES else "adamw"
        raise Refused(f"rule {kind}; expected its name, such as {known!r}: the rule runs on servers")
    # They choose between implementations of one formula.
    given = {key: value for key, value in given.items() if key not in IMPLEMENTATIONS or value}
    if ":" in name:
        if given:
            raise Refused(f"settings {sorted(given)} beside a configuration in text; expected them in the text")
        return Rule(name, {}, name, None)
    if name not in RULES:
        raise Refused(f"rule {name!r}; expected {', '.join(sorted(RULES))}, or a configuration in text")
    defaults, make = RULES[name]
    if unknown := sorted(given.keys() - defaults.keys()):
        raise Refused(f"rule {name!r} has no setting {', '.join(unknown)}; expected some of {', '.join(defaults)}")
    settings = {**defaults, **given}
    try:
        for value in settings.values():
            for number in value if isinstance(value, (tuple, list)) else [value]:
                if not 0 <= float(number) < inf:
                    raise ValueError(f"{value} among them")
        config, states = make(settings)
    except (TypeError, ValueError) as error:
        raise Refused(f"rule {name!r} with {settings}: {error}; expected settings as {defaults}") from error
    return Rule(name, settings, config, states)


def config(rule: str, settings: Settings) -> str:
    """The configuration of a rule by its name, with PyTorch's names of settings; or a configuration in text as it is,
    whose rate ``lr`` replaces.

    >>> config("adamw", {"lr": 0.001, "betas": (0.9, 0.99), "weight_decay": 0.1})
    'algorithm: "adamw" adamw { beta_1: 0.9 beta_2: 0.99 epsilon: 1e-08 } l2: 0.1 const_lr { learning_rate: 0.001 }'
    """
    given = dict(settings)
    rate = given.pop("lr")
    return rule_of(rule, given).at_rate(rate)


# The servers' own formulas where they are PyTorch's, else a text.


def _sgd(settings: Settings) -> Made:
    momentum, dampening = float(settings["momentum"]), float(settings["dampening"])
    if settings["nesterov"] and (momentum <= 0 or dampening != 0):
        raise ValueError("nesterov without momentum, or with dampening")
    if momentum == 0:
        return f"optimizer: SGD{_coupled(settings)}", {}
    # The first gradient is not dampened.
    share = "select(n == 1, 1, 1 - dampening) * " if dampening else ""
    step = "(g + momentum * momentum_buffer)" if settings["nesterov"] else "momentum_buffer"
    text = _text(
        f"param momentum in (0, inf) = {momentum!r}",
        *([f"param dampening in [0, inf) = {dampening!r}"] if dampening else []),
        "state momentum_buffer = 0",
        f"momentum_buffer = momentum * momentum_buffer + {share}g",
        f"w -= lr * {step}",
    )
    return text + _coupled(settings), _as_named("momentum_buffer")


def _adam(settings: Settings) -> Made:
    if settings["amsgrad"]:
        return _amsgrad(settings) + _coupled(settings), _as_named("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    return f"optimizer: Adam adam {{ {_moments(settings)} }}{_coupled(settings)}", ADAM_STATES


def _adamw(settings: Settings) -> Made:
    decay = float(settings["weight_decay"])
    if settings["amsgrad"]:
        text = f"{_amsgrad(settings)} regularizer: Decoupled l2: {decay!r}"
        return text, _as_named("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    return f'algorithm: "adamw" adamw {{ {_moments(settings)} }} l2: {decay!r}', ADAM_STATES


def _adagrad(settings: Settings) -> Made:
    initial, epsilon = float(settings["initial_accumulator_value"]), float(settings["eps"])
    decay = float(settings["lr_decay"])
    rate = "lr / (1 + lr_decay * (n - 1))" if decay else "lr"
    text = _text(
        f"param epsilon in [0, inf) = {epsilon!r}",
        *([f"param lr_decay in [0, inf) = {decay!r}"] if decay else []),
        f"state square_sum = {initial!r}",
        "square_sum += g * g",
        f"w -= {rate} * g / (sqrt(square_sum) + epsilon)",
    )
    return text + _coupled(settings), {"square_sum": "sum"}


def _adadelta(settings: Settings) -> Made:
    rho, epsilon = float(settings["rho"]), float(settings["eps"])
    text = f"optimizer: Adadelta adadelta {{ rho: {rho!r} epsilon: {epsilon!r} }}{_coupled(settings)}"
    return text, {"gradient_square_mean": "square_avg", "step_square_mean": "acc_delta"}


def _rmsprop(settings: Settings) -> Made:
    share, epsilon, momentum = (float(settings[name]) for name in ("alpha", "eps", "momentum"))
    states, mean = ["square_avg"], "square_avg"
    given = [f"param alpha in [0, inf) = {share!r}", f"param epsilon in [0, inf) = {epsilon!r}"]
    lines = ["square_avg = alpha * square_avg + (1 - alpha) * g * g"]
    if settings["centered"]:
        states.append("grad_avg")
        lines.append("grad_avg = alpha * grad_avg + (1 - alpha) * g")
        mean = "max(square_avg - grad_avg * grad_avg, 0)"
    lines.append(f"let step = g / (sqrt({mean}) + epsilon)")
    if momentum:
        given.append(f"param momentum in (0, inf) = {momentum!r}")
        states.append("momentum_buffer")
        lines += ["momentum_buffer = momentum * momentum_buffer + step", "w -= lr * momentum_buffer"]
    else:
        lines.append("w -= lr * step")
    text = _text(*given, *(f"state {name} = 0" for name in states), *lines)
    return text + _coupled(settings), _as_named(*states)


def _lion(settings: Settings) -> Made:
    first, second = settings["betas"]
    values = {"b1": first, "b2": second, "wd": settings["weight_decay"]}
    sets = " ".join(f"rule_set {{ key: '{key}' value: {float(value)!r} }}" for key, value in values.items())
    return f'algorithm: "lion" {sets}', {"m": "exp_avg"}


def _amsgrad(settings: Settings) -> str:
    first, second = (float(beta) for beta in settings["betas"])
    return _text(
        f"param beta_1 in [0, 1) = {first!r}",
        f"param beta_2 in [0, 1) = {second!r}",
        f"param epsilon in [0, inf) = {float(settings['eps'])!r}",
        "state exp_avg = 0",
        "state exp_avg_sq = 0",
        "state max_exp_avg_sq = 0",
        "let root = sqrt(1 - beta_2 ^ n)",
        "exp_avg = beta_1 * exp_avg + (1 - beta_1) * g",
        "exp_avg_sq = beta_2 * exp_avg_sq + (1 - beta_2) * g * g",
        "max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq)",
        "let step = lr * root / (1 - beta_1 ^ n)",
        "w -= step * exp_avg / (sqrt(max_exp_avg_sq) + epsilon * root)",
    )


def _moments(settings: Settings) -> str:
    first, second = settings["betas"]
    return f"beta_1: {float(first)!r} beta_2: {float(second)!r} epsilon: {float(settings['eps'])!r}"


def _coupled(settings: Settings) -> str:
    decay = float(settings["weight_decay"])
    return f" regularizer: Coupled l2: {decay!r}" if decay else ""


def _text(*lines: str) -> str:
    return f"rule: '{'; '.join(lines)}'"


def _as_named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.Tensor)) and 0 <= float(value) < inf


IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}
"""Settings of PyTorch's optimizers that change no number, which may be given as false or None."""
CARRIED: dict[str, dict[str, tuple[str, ...]]] = {
    "sgd": {"momentum": ("momentum",), "dampening": ("dampening",), "weight_decay": ("l2",)},
    "adam": {"betas": ("beta_1", "beta_2"), "eps": ("epsilon",), "weight_decay": ("l2",)},
    "adamw": {"betas": ("beta_1", "beta_2"), "eps": ("epsilon",), "weight_decay": ("l2",)},
    "adagrad": {"lr_decay": ("lr_decay",), "eps": ("epsilon",), "weight_decay": ("l2",)},
    "adadelta": {"rho": ("rho",), "eps": ("epsilon",), "weight_decay": ("l2",)},
    "rmsprop": {"alpha": ("alpha",), "eps": ("epsilon",), "momentum": ("momentum",), "weight_decay": ("l2",)},
    "lion": {"betas": ("b1", "b2"), "weight_decay": ("wd",)},
}
"""Settings that a step may carry, with the servers' names of their numbers."""
OPTIONAL = {"momentum", "dampening", "weight_decay", "lr_decay"}
"""Settings of which a rule that is constructed with zero has no term."""
ADAM_STATES = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}

RULES: dict[str, tuple[Settings, Callable[[Settings], Made]]] = {
    "sgd": ({"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}, _sgd),
    "adam": (ADAM, _adam),
    "adamw": ({**ADAM, "weight_decay": 0.01}, _adamw),
    "adagrad": ({"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}, _adagrad),
    "adadelta": ({"rho": 0.9, "eps": 1e-6, "weight_decay": 0.0}, _adadelta),
    "rmsprop": (
        {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
        _rmsprop,
    ),
    "lion": ({"betas": (0.9, 0.99), "weight_decay": 0.0}, _lion),
}
"""Names of rules, each with its settings and their values by default."""
