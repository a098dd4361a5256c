"""Rules by name, with PyTorch's names of settings, as configurations in text."""

from collections.abc import Callable
from typing import Any

from .._errors import Refused


def config(rule: str, settings: dict[str, Any]) -> str:
    """The configuration of a rule by its name, with PyTorch's names of settings; or a configuration in text as it is,
    whose rate ``lr`` replaces.

    >>> config("adamw", {"lr": 0.001, "betas": (0.9, 0.99), "weight_decay": 0.1})
    'algorithm: "adamw" adamw { beta_1: 0.9 beta_2: 0.99 epsilon: 1e-08 } l2: 0.1 const_lr { learning_rate: 0.001 }'
    """
    given = dict(settings)
    rate = f"const_lr {{ learning_rate: {float(given.pop('lr'))!r} }}"
    if ":" in rule:
        if given:
            raise Refused(f"settings {sorted(given)} beside a configuration in text; expected them in the text")
        return f"{rule} {rate}"
    if rule not in RULES:
        raise Refused(f"rule {rule!r}; expected {', '.join(sorted(RULES))}, or a configuration in text")
    made = RULES[rule](given)
    if given:
        raise Refused(f"rule {rule!r} has no setting {', '.join(sorted(given))}")
    return f"{made} {rate}"


def _sgd(given: dict[str, Any]) -> str:
    momentum, nesterov = float(given.pop("momentum", 0.0)), bool(given.pop("nesterov", False))
    inner = f" sgd {{ momentum: {momentum!r} nesterov: {str(nesterov).lower()} }}" if momentum else ""
    return f"optimizer: SGD{inner}" + _coupled(given)


def _adam(given: dict[str, Any]) -> str:
    return f"optimizer: Adam adam {{ {_moments(given)} }}" + _coupled(given)


def _adamw(given: dict[str, Any]) -> str:
    decay = float(given.pop("weight_decay", 0.01))
    return f'algorithm: "adamw" adamw {{ {_moments(given)} }} l2: {decay!r}'


def _adagrad(given: dict[str, Any]) -> str:
    return f"optimizer: Adagrad adagrad {{ epsilon: {float(given.pop('eps', 1e-10))!r} }}" + _coupled(given)


def _adadelta(given: dict[str, Any]) -> str:
    rho, epsilon = float(given.pop("rho", 0.9)), float(given.pop("eps", 1e-6))
    return f"optimizer: Adadelta adadelta {{ rho: {rho!r} epsilon: {epsilon!r} }}" + _coupled(given)


def _rmsprop(given: dict[str, Any]) -> str:
    rho, epsilon = float(given.pop("alpha", 0.99)), float(given.pop("eps", 1e-8))
    return f'algorithm: "rmsprop" rmsprop {{ rho: {rho!r} epsilon: {epsilon!r} }}' + _coupled(given)


def _lion(given: dict[str, Any]) -> str:
    first, second = given.pop("betas", (0.9, 0.99))
    values = {"b1": first, "b2": second, "wd": given.pop("weight_decay", 0.0)}
    sets = " ".join(f"rule_set {{ key: '{key}' value: {float(value)!r} }}" for key, value in values.items())
    return f'algorithm: "lion" {sets}'


def _moments(given: dict[str, Any]) -> str:
    first, second = given.pop("betas", (0.9, 0.999))
    return f"beta_1: {float(first)!r} beta_2: {float(second)!r} epsilon: {float(given.pop('eps', 1e-8))!r}"


def _coupled(given: dict[str, Any]) -> str:
    decay = float(given.pop("weight_decay", 0.0))
    return f" regularizer: Coupled l2: {decay!r}" if decay else ""


RULES: dict[str, Callable[[dict[str, Any]], str]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "rmsprop": _rmsprop,
    "lion": _lion,
}
