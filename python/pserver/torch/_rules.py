"""Rules by name, with PyTorch's settings, formulas and names of states, as configurations in text."""

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from .._errors import Refused

Settings = dict[str, Any]
Made = tuple[str, dict[str, str]]
"""A configuration, and PyTorch's names of the rule's states by those that servers have."""


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
    share = f"select(n == 1, 1, {1 - dampening!r}) * " if dampening else ""
    step = f"(g + {momentum!r} * momentum_buffer)" if settings["nesterov"] else "momentum_buffer"
    text = _text(
        "state momentum_buffer = 0",
        f"momentum_buffer = {momentum!r} * momentum_buffer + {share}g",
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
    rate = f"lr / (1 + {decay!r} * (n - 1))" if decay else "lr"
    text = _text(
        f"state square_sum = {initial!r}",
        "square_sum += g * g",
        f"w -= {rate} * g / (sqrt(square_sum) + {epsilon!r})",
    )
    return text + _coupled(settings), {"square_sum": "sum"}


def _adadelta(settings: Settings) -> Made:
    rho, epsilon = float(settings["rho"]), float(settings["eps"])
    text = f"optimizer: Adadelta adadelta {{ rho: {rho!r} epsilon: {epsilon!r} }}{_coupled(settings)}"
    return text, {"gradient_square_mean": "square_avg", "step_square_mean": "acc_delta"}


def _rmsprop(settings: Settings) -> Made:
    share, epsilon, momentum = (float(settings[name]) for name in ("alpha", "eps", "momentum"))
    states, mean = ["square_avg"], "square_avg"
    lines = [f"square_avg = {share!r} * square_avg + {1 - share!r} * g * g"]
    if settings["centered"]:
        states.append("grad_avg")
        lines.append(f"grad_avg = {share!r} * grad_avg + {1 - share!r} * g")
        mean = "max(square_avg - grad_avg * grad_avg, 0)"
    lines.append(f"let step = g / (sqrt({mean}) + {epsilon!r})")
    if momentum:
        states.append("momentum_buffer")
        lines += [f"momentum_buffer = {momentum!r} * momentum_buffer + step", "w -= lr * momentum_buffer"]
    else:
        lines.append("w -= lr * step")
    return _text(*(f"state {name} = 0" for name in states), *lines) + _coupled(settings), _as_named(*states)


def _lion(settings: Settings) -> Made:
    first, second = settings["betas"]
    values = {"b1": first, "b2": second, "wd": settings["weight_decay"]}
    sets = " ".join(f"rule_set {{ key: '{key}' value: {float(value)!r} }}" for key, value in values.items())
    return f'algorithm: "lion" {sets}', {"m": "exp_avg"}


def _amsgrad(settings: Settings) -> str:
    first, second = (float(beta) for beta in settings["betas"])
    return _text(
        "state exp_avg = 0",
        "state exp_avg_sq = 0",
        "state max_exp_avg_sq = 0",
        f"let root = sqrt(1 - {second!r} ^ n)",
        f"exp_avg = {first!r} * exp_avg + {1 - first!r} * g",
        f"exp_avg_sq = {second!r} * exp_avg_sq + {1 - second!r} * g * g",
        "max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq)",
        f"let step = lr * root / (1 - {first!r} ^ n)",
        f"w -= step * exp_avg / (sqrt(max_exp_avg_sq) + {float(settings['eps'])!r} * root)",
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


IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}
"""Settings of PyTorch's optimizers that change no number, which may be given as false or None."""
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
