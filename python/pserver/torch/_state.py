"""The optimizer's state of a parameter in PyTorch's layout, out of servers and into them."""

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

import torch

from .._client import Client
from .._errors import Refused
from ._rules import RULES, Rule
from ._weights import HALVES, Weight, array

MASTER = "master_weight"
"""The value as servers have it, of a parameter in half precision."""
EXACT_IN_FLOAT32 = 2**24
UPDATES_MAX = 2**53
"""The servers' bound."""


class Loaded(NamedTuple):
    """The state of a parameter, checked, as servers take it."""

    weight: Weight
    tensors: dict[str, torch.Tensor]
    updates: int
    value: torch.Tensor | None


def state_of(client: Client, weight: Weight, rule: Rule) -> dict[str, torch.Tensor]:
    """The state of a parameter. As PyTorch's it is empty before the first update, where it counts none."""
    found = client.state(weight.name)
    made: dict[str, torch.Tensor] = {}
    if rule.has_step:
        dtype = torch.float32 if found.updates < EXACT_IN_FLOAT32 else torch.float64
        made["step"] = torch.tensor(found.updates, dtype=dtype)
    elif found.updates == 0:
        return made
    shape = weight.tensor.shape
    made.update({rule.state(name): torch.from_numpy(tensor).reshape(shape) for name, tensor in found.tensors.items()})
    if weight.tensor.dtype in HALVES:
        made[MASTER] = torch.from_numpy(client.pull([weight.name])[weight.name]).reshape(shape)
    return made


def checked(client: Client, weight: Weight, rule: Rule, given: Mapping[str, Any]) -> Loaded:
    """The state to load into a parameter."""
    where = f'parameter "{weight.name}"'
    given = {name: value for name, value in given.items() if value is not None}
    names = list(client.state(weight.name).tensors if rule.states is None else rule.states)
    if not given and rule.states is not None:
        initial = torch.full(weight.tensor.shape, rule.initial, dtype=weight.dtype)
        return Loaded(weight, dict.fromkeys(names, initial), 0, None)
    expected = [rule.state(name) for name in names] + (["step"] if rule.has_step else [])
    if not set(expected) <= given.keys():
        text = f"a state of {sorted(map(str, given))}; expected {sorted(expected)}"
        raise Refused(f'{where}: {text}, as rule "{rule.name}" has')

    def tensor(name: str) -> torch.Tensor:
        return tensor_of(f'{where}: state "{name}"', tuple(weight.tensor.shape), weight.dtype, given[name])

    tensors = {name: tensor(rule.state(name)) for name in names}
    value = tensor(MASTER) if MASTER in given else None
    return Loaded(weight, tensors, _updates(where, given["step"]) if rule.has_step else 1, value)


def groups_of(state_dict: Mapping[str, Any], name: str, rules: list[Rule], groups: list[Any]) -> list[dict[str, Any]]:
    """The groups to load, if they are of the rule ``name``, have the sizes of ``groups``, and have settings that a step
    may carry."""
    if not isinstance(state_dict, Mapping):
        raise Refused(f"a state of {type(state_dict).__name__}; expected that of an optimizer's state_dict()")
    if not {"state", "param_groups"} <= state_dict.keys():
        raise Refused(f"a state of {sorted(map(str, state_dict))}; expected that of an optimizer's state_dict()")
    saved = state_dict.get("rule", name)
    if saved != name and {saved, name} & RULES.keys():
        raise Refused(f"a state of rule {saved!r}; expected one of {name!r}, or an optimizer with that rule")
    given = state_dict["param_groups"]
    if not isinstance(given, list) or not all(isinstance(group, Mapping) and "params" in group for group in given):
        raise Refused(f"param_groups {given!r:.200}; expected a list of groups, each with params and its settings")
    states = state_dict["state"]
    if not isinstance(states, Mapping) or not all(isinstance(one, Mapping) for one in states.values()):
        raise Refused(f"a state {states!r:.200}; expected that of each parameter by its name")
    found, expected = ([len(group["params"]) for group in some] for some in (given, groups))
    if found != expected:
        raise Refused(f"a state of groups with {found} parameters; expected {expected}, as the optimizer has")
    for rule, group in zip(rules, given):
        rate = group.get("lr", 0.0)
        if not isinstance(rate, (int, float, torch.Tensor)) or not 0 <= float(rate) < inf:
            raise Refused(f"lr is {rate!r} in the state; expected a number of 0 or more")
        rule.numbers(group, "in the state")
    return [{**mine, **group} for mine, group in zip(groups, given)]


def load(client: Client, every: list[Loaded]) -> None:
    """Replaces the states, and the values that come with them."""
    for one in every:
        name = one.weight.name
        client.set_state(name, {of: array(tensor) for of, tensor in one.tensors.items()}, one.updates)
    values = {one.weight.name: array(one.value) for one in every if one.value is not None}
    if values:
        client.set(values)


def tensor_of(where: str, shape: tuple[int, ...], dtype: torch.dtype, given: Any) -> torch.Tensor:
    """A tensor to load, of this shape, as servers take it."""
    if not isinstance(given, torch.Tensor):
        raise Refused(f"{where} is of {type(given).__name__}; expected a tensor of shape {shape}")
    if tuple(given.shape) != shape:
        raise Refused(f"{where} has shape {tuple(given.shape)}; expected {shape}")
    if given.is_complex() or not bool(torch.isfinite(given).all()):
        raise Refused(f"{where} has NaN or infinity, or is complex; expected real numbers")
    return given.detach().to("cpu", dtype).contiguous()


def _updates(where: str, given: Any) -> int:
    try:
        found = float(given)
    except (TypeError, ValueError, RuntimeError):
        found = -1.0
    if not (0 <= found <= UPDATES_MAX and found.is_integer()):
        raise Refused(f'{where}: state "step" is {given}; expected a number of updates, at most {UPDATES_MAX}')
    return int(found)
