"""The rows of a table and the optimizer's state of them, out of servers and into them, in pieces.

::

    {"ids": int64 [rows], "rows": [rows, width], "exp_avg": [rows, width], ..., "updates": 20, "rates": [(1, 0.1)]}
"""

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray

from .._client import Client, Rows
from .._errors import Refused
from ._embedding import Table
from ._rules import Rule
from ._state import UPDATES_MAX, tensor_of

PIECE_BYTES = 16 << 20
"""About so many bytes of values travel at a time."""


class LoadedRows(NamedTuple):
    """Rows of a table, checked, as servers take them."""

    table: Table
    ids: NDArray[numpy.int64]
    rows: NDArray[Any]
    tensors: dict[str, NDArray[Any]]
    updates: int
    rates: list[tuple[int, float | None]]


def rows_of(client: Client, table: Table, rule: Rule) -> dict[str, Any]:
    """All rows of a table and their state."""
    # A piece without rows has the updates, before which no row is listed, and the names of the states.
    whole = client.state(table.name, numpy.empty(0, numpy.int64))
    ids = client.rows(table.name).astype(numpy.int64)
    rows = numpy.empty((len(ids), table.width), table.type_name)
    tensors = {name: numpy.empty((len(ids), table.width), table.type_name) for name in whole.tensors}
    for piece in _pieces(table, len(ids)):
        client.pull_rows(table.name, ids[piece], rows[piece])
        state = client.state(table.name, ids[piece])
        if state.updates != whole.updates:
            text = "expected one: state_dict(tables=True) while no trainer makes a step"
            raise Refused(f'table "{table.name}": rows after {whole.updates} and after {state.updates} updates; {text}')
        for name, tensor in state.tensors.items():
            tensors[name][piece] = tensor
    states = {rule.state(name): torch.from_numpy(tensor) for name, tensor in tensors.items()}
    found = {"ids": torch.from_numpy(ids), "rows": torch.from_numpy(rows), **states}
    return {**found, "updates": whole.updates, "rates": list(whole.rates)}


def checked_rows(table: Table, rule: Rule, given: Mapping[str, Any]) -> LoadedRows:
    """The rows to load into a table."""
    where = f'table "{table.name}"'
    names = {rule.state(name): name for name in rule.states} if rule.states is not None else {}
    if rule.states is None:
        names = {name: name for name in given if name not in {"ids", "rows", "updates", "rates"}}
    expected = {"ids", "rows", "updates", "rates", *names}
    if given.keys() != expected:
        text = f"expected {sorted(expected)}, as state_dict(tables=True) has"
        raise Refused(f"{where}: a state of {sorted(map(str, given))}; {text}")
    ids = given["ids"]
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
        raise Refused(f"{where}: ids {ids!r:.200}; expected a tensor of int64, one for each row")
    once = len(torch.unique(ids))
    if len(ids) > 0 and (int(ids.min()) < 0 or int(ids.max()) >= table.height or once < len(ids)):
        raise Refused(f"{where}: ids that repeat, or not of 0 to {table.height - 1}; expected each row once")

    def tensor(name: str) -> NDArray[Any]:
        shape = (len(ids), table.width)
        made: NDArray[Any] = tensor_of(f'{where}: "{name}"', shape, table.dtype, given[name]).numpy()
        return made

    tensors, rows = {of: tensor(name) for name, of in names.items()}, tensor("rows")
    updates = given["updates"]
    if type(updates) is not int or not 0 <= updates <= UPDATES_MAX:
        raise Refused(f"{where}: updates {updates!r}; expected a number, at most {UPDATES_MAX}")
    return LoadedRows(table, ids.to("cpu").numpy(), rows, tensors, updates, _rates(where, given["rates"], updates))


def _rates(where: str, given: Any, updates: int) -> list[tuple[int, float | None]]:
    """Rates by their first updates, which ascend."""
    last = 0
    found: list[tuple[int, float | None]] = []
    for one in given if isinstance(given, (list, tuple)) else [given]:
        first, rate = one if isinstance(one, (list, tuple)) and len(one) == 2 else (None, None)
        is_rate = rate is None or (isinstance(rate, (int, float)) and 0 <= rate < inf)
        if type(first) is not int or not last < first <= max(1, updates) or not is_rate:
            text = f"expected pairs of an update, in ascending order up to {updates}, and a rate of 0 or more"
            raise Refused(f"{where}: rates with {one!r:.200}; {text}")
        last = first
        found.append((first, rate))
    return found


def load_rows(client: Client, every: list[LoadedRows]) -> None:
    """Replaces rows and their states."""
    for table, ids, rows, tensors, updates, rates in every:
        table.forget_rows()
        for piece in _pieces(table, len(ids)):
            client.load({table.name: Rows(ids[piece], rows[piece])})
            some = {name: tensor[piece] for name, tensor in tensors.items()}
            client.set_state(table.name, some, None, ids=ids[piece])
        none = {name: tensor[:0] for name, tensor in tensors.items()}
        client.set_state(table.name, none, updates, ids=ids[:0], rates=rates)


def _pieces(table: Table, rows: int) -> Iterator[slice]:
    step = max(1, PIECE_BYTES // (table.width * table.dtype.itemsize))
    return (slice(begin, begin + step) for begin in range(0, rows, step))
