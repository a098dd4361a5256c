"""Models that have a job's weights: a reader that follows them, and files of them."""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from .._client import Client, last_client
from .._errors import Error, Refused, Timeout
from ._buffers import Buffers, plain
from ._embedding import Table
from ._weights import Places, Weight, kept

SETTLES = 3
SETTLE_SECONDS = 0.02
"""How often, and for how long, a follower waits for first updates of one step."""
ATTEMPTS = 50
"""Fetches of one update, each of which may have met servers between two versions."""


class Fetched(NamedTuple):
    """What a follower has fetched and not installed."""

    versions: dict[str, int]
    places: Places | None
    """None where the weights are the model's."""
    buffers: dict[str, torch.Tensor]


class Follower:
    """A model with the newest weights of a job: a reader, which is no trainer and which no trainer waits for.

    :meth:`update` between two batches installs the weights that were fetched meanwhile, if there are newer ones, with
    the job's buffers, and starts to fetch the next. A version is whole: every parameter has had as many updates as the
    others; parameters that had none may stay behind. With ``together=False`` each parameter is whole by itself: for jobs that do not update all
    of them in each step, such as those of :class:`DiLoCo` with fragments.
    """

    def __init__(self, model: torch.nn.Module, client: Client, is_own: bool, together: bool) -> None:
        self.client = client
        self.versions: dict[str, int] = {}
        """The updates that each parameter of the model has had."""
        self._is_own, self._together, self._is_closed = is_own, together, False
        self._fetches = 0
        self._weights: list[Weight] = []
        self._thread = ThreadPoolExecutor(1, "pserver-follow")
        self._fetched: "Future[Fetched | None] | None" = None
        names = {one.name for one in client.parameters()}
        for name, tensor in server_names(model.named_parameters(), names).items():
            if Table.is_of(tensor):
                Table.of(tensor, name).bind(client)
            else:
                self._weights.append(Weight(name, tensor))
        self._buffers = Buffers(model, names)
        self._installed: dict[str, torch.Tensor] = {}
        self.update(wait=True)

    def update(self, wait: bool = False) -> bool:
        """Installs newer weights that are here; true if there were some. ``wait``: asks servers now, and waits."""
        if self._is_closed:
            raise Refused("this follower is closed; expected an open one, from follow(model)")
        if self._fetched is None or (self._fetched.done() and wait):
            self._fetched = self._thread.submit(self._fetch)
        if not wait and not self._fetched.done():
            return False
        fetched, self._fetched = self._fetched, None
        found = fetched.result()
        if not wait:
            self._fetched = self._thread.submit(self._fetch)
        if found is None:
            return False
        self.versions, places, self._installed = found
        if places is not None:
            places.finish()
        self._buffers.install(self._installed)
        return True

    def _fetch(self) -> "Fetched | None":
        """A whole version, into memory of its own, unless the model has it."""
        # The last fetch may not be installed yet: memory of two takes turns.
        self._fetches += 1
        for attempt in range(ATTEMPTS):
            versions = {one.name: one.version for one in self.client.parameters()}
            versions = {weight.name: versions[weight.name] for weight in self._weights}
            if versions == self.versions:
                buffers = self._buffers.fetched(self.client)
                is_same = all(torch.equal(one, self._installed[name]) for name, one in buffers.items())
                return None if is_same else Fetched(versions, None, buffers)
            places = Places(self._weights, is_staged=True, use=kept(f"follower {self._fetches % 2}", self._weights))
            moving = [name for name, version in versions.items() if version > 0 or not self._together]
            counts = [versions[name] for name in moving]
            # Servers were asked one after the other, while the job went on: the list is made again.
            if self._together and moving and max(counts) - min(counts) > 1 and attempt + 1 < ATTEMPTS:
                continue
            for group in [moving] if self._together and moving else [[name] for name in moving]:
                version = self._fetch_whole(places, group, {name: versions[name] for name in group})
                versions.update(dict.fromkeys(group, version))
            resting = {name: places.arrays[name] for name in versions if name not in set(moving)}
            # Servers make the first update of a step one after the other, and a parameter without one may be about to.
            if self._together and resting and attempt < SETTLES and counts and max(counts) == 1:
                time.sleep(SETTLE_SECONDS)
                continue
            # A parameter that had its first update meanwhile is one of the others.
            if not resting or self.client.pull_version(resting) == 0:
                return Fetched(versions, places, self._buffers.fetched(self.client))
        raise Timeout(f"a parameter had its first update in each of {ATTEMPTS} fetches; expected jobs that go on")

    def _fetch_whole(self, places: Places, names: list[str], versions: dict[str, int]) -> int:
        """Fetches parameters at one version, which each of them has sooner or later."""
        first, last = min(versions, key=lambda name: versions[name]), max(versions, key=lambda name: versions[name])
        version = versions[last]
        if version - versions[first] > 1 and self._together:
            text = f'{version} updates of "{last}" and {versions[first]} of "{first}"'
            raise Refused(f"{text}; expected parameters that are updated together, or follow(..., together=False)")
        arrays = {name: places.arrays[name] for name in names}
        for _ in range(ATTEMPTS):
            found = self.client.pull_version(arrays, version)
            if found == version:
                return version
            version = found
        text = f"servers had another version in each of {ATTEMPTS} fetches"
        raise Timeout(f"{text}; the job updates faster than it is read")

    def close(self) -> None:
        """Ends the reader. The model keeps its weights."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True, wait=False)
        if self._is_own:
            self.client.close()
        self._thread.shutdown()

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def follow(
    model: torch.nn.Module,
    coordinator: str | None = None,
    *,
    together: bool = True,
    client: Client | None = None,
    **settings: Any,
) -> Follower:
    """Gives a model the newest weights of a job, and keeps it at them: :meth:`Follower.update`. The job is that at
    ``coordinator``, else that of the last :func:`pserver.connect`, else as the environment says; ``settings`` are those
    of a :class:`pserver.Client`. The model has the names that the trainers' model has."""
    if client is not None:
        return Follower(model, client, False, together)
    if coordinator is None:
        try:
            coordinator = last_client().coordinator
        except Error:
            coordinator = None
    own = Client(coordinator, reader=True, **settings)
    try:
        return Follower(model, own, True, together)
    except BaseException:
        own.close()
        raise


def save_model(path: str, *, client: Client | None = None) -> str:
    """Saves the job's weights as safetensors, below server 0's ``model_dir`` on its machine; returns where. Each tensor
    has the name and the shape of the parameter; a table of rows is a matrix, up to 1 GiB."""
    return (client if client is not None else last_client()).save(path)[0]


def load_model(path: str | Path, model: torch.nn.Module) -> None:
    """Gives a model the weights of a file that :func:`save_model` saved, and the buffers that the file has. A trainer
    makes them the job's by :meth:`Optimizer.set_weights` and :meth:`Optimizer.set_buffers`.

    Raises:
        Refused: the file is none of safetensors, or lacks a parameter of the model.
        RuntimeError: a tensor has another shape.
    """
    # Here, because torch.export takes a second to load.
    from ..export.text import read_safetensors

    try:
        found = read_safetensors(path)
    except ValueError as error:
        raise Refused(str(error)) from error
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    state = model.state_dict()
    for at, tensor in server_names(model.named_parameters(), found).items():
        if not Table.is_of(tensor):
            state[names[id(tensor)]] = found[at]
    for name, tensor in model.named_buffers():
        if name in state and plain(name) in found:
            state[name] = found[plain(name)].reshape(tensor.shape)
    model.load_state_dict(state)


def server_names(
    parameters: Iterable[tuple[str, torch.Tensor]], known: Iterable[str]
) -> Mapping[str, torch.Tensor]:
    """The parameters of a model by their names at the servers: their own, also where ``torch.compile`` has changed them,
    or, where an optimizer had no names, by their places. Frozen ones may be the model's own."""
    every = [(plain(name), tensor) for name, tensor in parameters]
    names = {plain(name): name for name in known}
    if not any(name in names for name, _ in every):
        every = [(f"parameter.{at}", tensor) for at, (_, tensor) in enumerate(every)]
    lacking = [(name, tensor) for name, tensor in every if name not in names and not Table.is_of(tensor)]
    trained = [name for name, tensor in lacking if tensor.requires_grad and tensor.numel() > 0]
    if trained:
        text = "expected the names of model.named_parameters() at the optimizer, or requires_grad_(False) for others"
        raise Refused(f"servers have no {trained[:5]}; {text}")
    return {names[name]: tensor for name, tensor in every if name in names}
