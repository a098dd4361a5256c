"""Clients: a trainer's calls with numpy arrays, torch tensors, and other arrays of the host."""

import asyncio
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, cast

import numpy
from numpy.typing import NDArray

from . import _log, _pserver, _torchrun
from ._errors import Error, Refused
from ._servers import Servers

Array: TypeAlias = Any
"""An object with the buffer protocol (numpy arrays, memoryview) or with DLPack (torch tensors), on the host."""
Settings: TypeAlias = Mapping[str, float]
"""Numbers of a rule, by name."""
Stream: TypeAlias = Any
"""A CUDA stream: one of torch or CuPy, another object with ``__cuda_stream__``, its handle as a number, or None."""
Held: TypeAlias = _pserver.RawArrays
"""Arrays of parameters that were looked at."""

NO_NUMBERS: tuple[None, tuple[()]] = (None, ())
EAGER_TURNS = 16
"""So many turns of the event loop a task asks at once whether the call that it awaits is over."""
POLL_SECONDS, POLL_SECONDS_MAX = 1e-3, 5e-3
"""After these seconds it asks again, more rarely the longer it has waited."""

_logger = logging.getLogger("pserver")
_last: "weakref.ref[Client] | None" = None


class Parameter(NamedTuple):
    """A parameter of a job."""

    name: str
    dtype: str
    """The type of its elements, such as ``float32``."""
    shape: tuple[int, ...]
    """The slowest dimension first. Of a parameter by rows: height (0 without one) and width."""
    is_rows: bool
    """Whether it is sent and fetched by rows."""
    version: int
    """The updates that it has had."""


class State(NamedTuple):
    """The optimizer's state of a parameter, as servers hold it."""

    updates: int
    """The updates that it has seen."""
    tensors: dict[str, NDArray[Any]]
    """Each tensor by its name in the rule, such as ``first_moment`` of Adam, in the type and shape of the parameter,
    which is never of half precision; of a parameter by rows, a row for each id."""
    ids: Array | None = None
    """The rows."""
    rates: Sequence[tuple[int, float | None]] = ()
    """Of a parameter by rows whose rule changes rows without gradients: the learning rates that came with gradients,
    each with its first update."""


class Rows(NamedTuple):
    """Rows of a parameter, for :meth:`Client.load`."""

    ids: Array
    values: Array
    """A row for each id."""


class Checkpoint(NamedTuple):
    """A checkpoint of a job."""

    version: int
    """The fewest updates that a part of a parameter had when it began."""
    bytes: int
    directories: list[str]
    """The directory of each shard's checkpoints, on the machine of its server."""


class Call:
    """A call that was started. Its arrays are the library's until it is over: gradients stay as they are, and
    destinations are not touched. ``await call`` is :meth:`wait` without blocking the event loop; a task that is
    cancelled there, as by ``asyncio.wait_for``, cancels the call."""

    def __init__(self, raw: _pserver.RawCall, stream: Stream = None) -> None:
        self._raw = raw
        self._stream = stream
        """The CUDA stream in which values are copied to a device at the end. It lives as long as the call."""

    def wait(self) -> None:
        """Waits until the call is over, and raises what the blocking call would."""
        self._raw.wait()

    def done(self) -> bool:
        """Whether the call is over, well or not."""
        return self._raw.done()

    def cancel(self) -> None:
        """Ends the call, unless it is over: :meth:`wait` raises :class:`Cancelled`, and the arrays are the program's
        again after it. Servers may have the gradients; if the program pushes them again, they count once."""
        self._raw.cancel()

    def __await__(self) -> Generator[Any, None, None]:
        return self._finish().__await__()

    async def _finish(self) -> None:
        turns, delay = 0, POLL_SECONDS
        try:
            # Without a thread for each call, of which an event loop has few.
            while not self._raw.done():
                await asyncio.sleep(delay if turns >= EAGER_TURNS else 0)
                turns, delay = turns + 1, min(1.1 * delay, POLL_SECONDS_MAX)
        except asyncio.CancelledError:
            self._raw.cancel()
            with suppress(Error):
                self._raw.wait()
            raise
        self._raw.wait()


class StepCall:
    """A call of a step, which the step notes before it is started: an interrupt at its start finds it."""

    def __init__(self) -> None:
        self._raw: _pserver.RawCall | None = None
        """Once it is started."""

    @property
    def is_started(self) -> bool:
        return self._raw is not None

    def wait(self) -> None:
        """Waits until the call is over, and raises what the blocking call would."""
        if self._raw is not None:
            self._raw.wait()

    def wait_sums(self) -> list[int]:
        """:meth:`wait` for a call that fetches; returns the checksums of the values."""
        sums = None if self._raw is None else self._raw.wait()
        assert sums is not None, "it was started to sum them"
        return sums

    def cancel(self) -> None:
        """Ends the call, unless it is over: :meth:`wait` then raises :class:`Cancelled`."""
        if self._raw is not None:
            self._raw.cancel()


class Client:
    """A trainer's or reader's end of a job. It connects with its first call.

    Several threads may call it at once; calls about one parameter take turns. A process that was forked makes a client
    of its own. Every call raises an :class:`Error` within its deadline.
    """

    def __init__(
        self,
        coordinator: str | None = None,
        *,
        trainer: int | None = None,
        reader: bool | None = None,
        deadline: float | str | None = None,
        server_absence: float | str | None = None,
        token_file: str | None = None,
        encrypt: str | None = None,
        certificate: str | None = None,
        private_key: str | None = None,
        certificate_authority: str | None = None,
        poll: str | None = None,
        checks: str | None = None,
        rdma_device: str | None = None,
        rdma_fabric: str | None = None,
    ) -> None:
        options = {
            "coordinator": coordinator,
            "trainer": trainer,
            "reader": None if reader is None else ("yes" if reader else "no"),
            "deadline": _seconds(deadline),
            "server_absence": _seconds(server_absence),
            "token_file": token_file,
            "encrypt": encrypt,
            "certificate": certificate,
            "private_key": private_key,
            "certificate_authority": certificate_authority,
            "poll": poll,
            "checks": checks,
            "rdma_device": rdma_device,
            "rdma_fabric": rdma_fabric,
        }
        words = [f"{name}={value}" for name, value in options.items() if value is not None]
        _log.begin()
        self._raw = _pserver.RawClient(" ".join(words))
        self._known: dict[str, tuple[numpy.dtype[Any], tuple[int, ...], bool]] = {}
        self._servers: Servers | None = None
        self._is_closed = False
        self._streams: list[Stream] = []
        """Streams of registered arrays. They live as long as the client."""
        self._has_optimizer = False
        """Whether an optimizer has been constructed with this client."""

    # Initialisation

    def begin_init(self, config: str | None = None) -> bool:
        """Offers to initialise the parameters. True: this trainer was chosen, and calls :meth:`init` for each and then
        :meth:`finish_init`. False: another trainer has initialised them. ``config`` is the optimizer of all."""
        return self._raw.begin_init(config)

    def init(self, name: str, value: Array, config: str | None = None) -> None:
        """Declares a parameter with the type and the shape of its first value."""
        self._raw.init(name, value, config)

    def init_rows(self, name: str, config: str, dtype: str = "float32") -> None:
        """Declares a parameter that is sent and fetched by rows; ``config`` has ``sparse { ... }``."""
        self._raw.init_rows(name, dtype, config)

    def finish_init(self) -> None:
        """Everything is declared: the other trainers go on."""
        self._raw.finish_init()

    def init_all(
        self, values: Mapping[str, Array], config: str | None = None, configs: Mapping[str, str] | None = None
    ) -> bool:
        """Initialises a job with these parameters, unless another trainer does; true if this one did. ``configs`` has
        those of single parameters. Beside a job that is initialised another constant learning rate takes effect for
        gradients of this trainer, and any other difference of an optimizer is refused."""

        def declare() -> None:
            for name, value in values.items():
                self.init(name, value, (configs or {}).get(name))

        is_first = self._initialise(declare, config)
        for name, own in (configs or {}).items():
            if not is_first:
                self._raw.follow_optimizer(name, own)
        return is_first

    def _initialise(self, declare: Callable[[], None], config: str | None = None) -> bool:
        """Initialises a job with what ``declare`` declares, unless another trainer does; true if this one did."""
        if not self.begin_init(config):
            return False
        try:
            declare()
            self.finish_init()
        except BaseException:
            self._raw.give_up_init()
            raise
        return True

    # Steps

    def push(
        self,
        gradients: Mapping[str, Array],
        *,
        rate: float | None = None,
        settings: Settings | None = None,
        stream: Stream = None,
    ) -> None:
        """Sends gradients, or deltas in mode delta; ``rate`` replaces the learning rate of the configuration, and
        ``settings``, such as ``{"beta_1": 0.85}``, other numbers of the rule by name: those of the rule of every
        parameter of the call. Memory of a CUDA device (:meth:`register`) is read in the order of ``stream``."""
        names, arrays = _split(gradients)
        self._raw.push(names, arrays, _numbers(rate, settings), _stream(stream))

    def pull(
        self,
        what: Iterable[str] | Mapping[str, Array] | None = None,
        *,
        version: int = 0,
        stream: Stream = None,
    ) -> dict[str, Array]:
        """Fetches parameters: into the arrays of a mapping, or those of these names (all without any) into new numpy
        arrays. It waits until each has had ``version`` updates. Memory of a CUDA device is written in the order of
        ``stream``, and has the values when this returns."""
        if isinstance(what, str):
            raise TypeError(f'a text; expected a list of names, ["{what}"]')
        if not isinstance(what, Mapping):
            names = what if what is not None else (one.name for one in self.parameters() if not one.is_rows)
            what = self._empty(names)
        self.pull_version(what, version, stream=stream)
        return dict(what)

    def pull_version(self, out: Mapping[str, Array], least: int = 0, *, stream: Stream = None) -> int:
        """:meth:`pull` of at least so many updates into the arrays of a mapping; returns the most updates that a part of
        them has. Where that is ``least``, all parts have as many: they are of one version."""
        names, places = _split(out)
        return self._raw.pull(names, places, least, _stream(stream))

    def push_pull(
        self,
        gradients: Mapping[str, Array],
        out: Mapping[str, Array] | None = None,
        *,
        rate: float | None = None,
        settings: Settings | None = None,
        stream: Stream = None,
    ) -> dict[str, Array]:
        """Sends gradients and fetches the same parameters with these gradients in them, into ``out`` or new arrays.
        Memory of a CUDA device is read and written in the order of ``stream``."""
        names, arrays = _split(gradients)
        out = self._empty(names) if out is None else _ordered(gradients, out)
        self._raw.push_pull(names, (arrays, list(out.values())), _numbers(rate, settings), _stream(stream))
        return dict(out)

    def set(self, values: Mapping[str, Array]) -> None:
        """Replaces values. Updates are counted on, and the optimizer's state stays."""
        self._raw.set(*_split(values))

    def _hold(self, arrays: Mapping[str, Array], writes: bool = False) -> Held:
        """Looks at arrays of the host once, for several calls: gradients, or with ``writes`` destinations, also tensors
        that autograd follows. A call that is started takes them."""
        return self._raw.hold(list(arrays), list(arrays.values()), writes)

    def _hold_plain(self, names: Sequence[str], tensors: Sequence[Array], writes: bool = False) -> Held | None:
        """The same if all are contiguous tensors of the shape of their parameters, whose memory is sent or written as it
        is; none otherwise."""
        return self._raw.hold_plain(names, tensors, writes)

    def _check_push(self, gradients: Held, out: Held | None, rate: float | None, settings: Settings | None) -> None:
        """Refuses what :meth:`push_pull` would be refused for, before anything is sent: a step of several calls is
        checked whole before the first."""
        self._raw.check_push(gradients, out, _numbers(rate, settings))

    def _check_push_rows(
        self, name: str, gradients: Array, rate: float | None, settings: Settings | None = None
    ) -> None:
        """The same for the gradients of rows."""
        self._raw.check_rows(name, gradients, _numbers(rate, settings))

    def _start_pass(self, call: StepCall, names: Sequence[str], is_void: bool) -> None:
        """Starts to say that this trainer has no gradients for these parameters in this round (mode sync). ``is_void``:
        the round is no update, whatever others send."""
        self._raw.start_pass(call, names, is_void)

    def start_push(
        self,
        gradients: Mapping[str, Array],
        *,
        rate: float | None = None,
        settings: Settings | None = None,
        stream: Stream = None,
    ) -> Call:
        """:meth:`push`, started."""
        names, arrays = _split(gradients)
        return Call(self._raw.start(names, (arrays, None), _numbers(rate, settings), _stream(stream)), stream)

    def _start_held(
        self,
        call: StepCall,
        gradients: Held | None,
        out: Held | None,
        rate: float | None = None,
        settings: Settings | None = None,
        is_of_step: bool = False,
    ) -> None:
        """Starts to send gradients, to fetch values, or both, for the same parameters in the same order. ``is_of_step``: a
        call that sends none fetches the values that this trainer's gradients have made, without what others have set
        since."""
        self._raw.start_held(call, (gradients, out), _numbers(rate, settings), is_of_step)

    def start_pull(self, out: Mapping[str, Array], *, stream: Stream = None) -> Call:
        """:meth:`pull`, started."""
        names, places = _split(out)
        return Call(self._raw.start(names, (None, places), NO_NUMBERS, _stream(stream)), stream)

    def start_push_pull(
        self,
        gradients: Mapping[str, Array],
        out: Mapping[str, Array],
        *,
        rate: float | None = None,
        settings: Settings | None = None,
        stream: Stream = None,
    ) -> Call:
        """:meth:`push_pull`, started."""
        names, arrays = _split(gradients)
        both = arrays, list(_ordered(gradients, out).values())
        return Call(self._raw.start(names, both, _numbers(rate, settings), _stream(stream)), stream)

    # Rows

    def push_rows(
        self,
        name: str,
        ids: Array,
        gradients: Array,
        *,
        rate: float | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Sends rows of a gradient, row after row in the order of the ids, which may repeat: rows are summed. Ids of
        several dimensions, such as (batch, slots), have rows of these and the width: (batch, slots, width)."""
        self._check_rows(name, ids, gradients)
        self._raw.push_rows([name], [ids], [gradients], _numbers(rate, settings))

    def pull_rows(self, name: str, ids: Array, out: Array | None = None) -> Array:
        """Fetches rows in the order of the ids, which may repeat, into ``out`` or a new array of the ids' shape and the
        width."""
        out = self._empty_rows(name, ids) if out is None else out
        self._check_rows(name, ids, out)
        self._raw.pull_rows([name], [ids], [out])
        return out

    def push_pull_rows(
        self,
        name: str,
        ids: Array,
        gradients: Array,
        wanted: Array,
        out: Array | None = None,
        *,
        rate: float | None = None,
        settings: Settings | None = None,
    ) -> Array:
        """Sends rows of a gradient, and fetches the rows ``wanted`` with these gradients in them, such as those of the
        next step, into ``out`` or a new array. Repeated after an error, it applies no gradient twice."""
        out = self._empty_rows(name, wanted) if out is None else out
        self._check_rows(name, ids, gradients)
        self._check_rows(name, wanted, out)
        self._raw.push_pull_rows([name], ([ids], [gradients]), ([wanted], [out]), _numbers(rate, settings))
        return out

    def start_push_rows(
        self,
        name: str,
        ids: Array,
        gradients: Array,
        *,
        rate: float | None = None,
        settings: Settings | None = None,
    ) -> Call:
        """:meth:`push_rows`, started. Both arrays are the program's again when this returns."""
        self._check_rows(name, ids, gradients)
        return Call(self._raw.start_push_rows([name], [ids], [gradients], _numbers(rate, settings)))

    def start_pull_rows(self, name: str, ids: Array, out: Array) -> Call:
        """:meth:`pull_rows`, started: the rows of a later step travel while this one is computed."""
        self._check_rows(name, ids, out)
        return Call(self._raw.start_pull_rows([name], ([ids], [out]), None, NO_NUMBERS))

    def start_push_pull_rows(
        self,
        name: str,
        ids: Array,
        gradients: Array,
        wanted: Array,
        out: Array,
        *,
        rate: float | None = None,
        settings: Settings | None = None,
    ) -> Call:
        """:meth:`push_pull_rows`, started. ``ids`` and ``gradients`` are the program's again when this returns."""
        self._check_rows(name, ids, gradients)
        self._check_rows(name, wanted, out)
        numbers = _numbers(rate, settings)
        return Call(self._raw.start_pull_rows([name], ([wanted], [out]), ([ids], [gradients]), numbers))

    def rows(self, name: str) -> NDArray[numpy.uint64]:
        """The ids of all rows that somebody has pushed to, ascending."""
        return numpy.frombuffer(self._raw.list_rows(name), numpy.uint64).copy()

    # The job

    def parameters(self) -> list[Parameter]:
        """All parameters in the order of declaration. Waits until they are initialised."""
        listed = self._raw.parameters()
        return [Parameter(name, dtype, tuple(shape), rows, version) for name, dtype, shape, rows, version in listed]

    def state(self, name: str, ids: Array | None = None) -> State:
        """The optimizer's state of a parameter, all of it after the same updates. In mode sync it has every round in it
        that this trainer has pushed. Of a parameter by rows it is that of the rows ``ids``, or of all :meth:`rows`;
        pieces of a table with the same ``updates`` belong together."""
        if ids is None and not self._facts(name)[2]:
            updates, tensors = self._raw.state(name)
            return State(updates, {of: _array(tensor) for of, tensor in tensors})
        ids = self.rows(name) if ids is None else ids
        (updates, tensors), rates = self._raw.row_states(name, ids)
        return State(updates, {of: _array(tensor) for of, tensor in tensors}, ids, rates)

    def set_state(
        self,
        name: str,
        tensors: Mapping[str, Array],
        updates: int | None,
        *,
        ids: Array | None = None,
        rates: Sequence[tuple[int, float | None]] = (),
    ) -> None:
        """Replaces the optimizer's state of a parameter: every tensor of it, and the updates that they have seen. The
        value stays. One trainer calls it while the others wait.

        Of a parameter by rows it replaces that of the rows ``ids``. In pieces, ``updates`` (and ``rates``) come with
        the last, after all rows and their values: until then they are None."""
        if ids is not None:
            progress = None if updates is None else (updates, rates)
            self._raw.set_row_states(name, ids, (list(tensors), list(tensors.values())), progress)
        elif updates is None or len(rates) > 0:
            raise TypeError("updates=None or rates without ids; expected the rows, or a number of updates")
        else:
            self._raw.set_state(name, list(tensors), list(tensors.values()), updates)

    def check_optimizer(self, name: str, config: str) -> None:
        """Raises :class:`Refused` unless a parameter was initialised with the optimizer of this configuration. Learning
        rates may differ."""
        self._raw.check_optimizer(name, config)

    def checkpoint(self) -> Checkpoint:
        """Takes a checkpoint now, and returns when it is on the disks of all servers. Training may go on meanwhile."""
        return Checkpoint(*self._raw.checkpoint())

    def load(self, values: Mapping[str, Array | Rows] | str | PathLike[str]) -> list[str]:
        """Replaces values of parameters by those of a mapping, of parameters by rows by :class:`Rows`, or by those of a
        safetensors file such as :meth:`save` writes; returns their names. Rows that are not given stay, and so does the
        optimizer's state. Every name, type and shape is checked before anything is replaced. One trainer calls it while
        the others wait."""
        if isinstance(values, (str, PathLike)):
            return self._raw.load_file(values)
        tables = {name: rows for name, rows in values.items() if isinstance(rows, Rows)}
        whole = {name: value for name, value in values.items() if name not in tables}
        rows = [one.ids for one in tables.values()], [one.values for one in tables.values()]
        self._raw.load((list(whole), list(whole.values())), list(tables), rows)
        return list(values)

    def save(self, path: str) -> tuple[str, int]:
        """Saves the model below server 0's ``model_dir``; returns where, and its bytes. In mode sync it is of the step
        that this trainer sent last, and a reader saves one only when no trainer is connected."""
        return self._raw.save(path)

    @property
    def trainer(self) -> int:
        """The rank. Joins the job if necessary."""
        return self._raw.trainer()

    @property
    def trainers(self) -> int:
        """The number of trainers of the job."""
        return self._raw.trainers()

    @property
    def servers(self) -> int:
        """The number of servers of the job."""
        return self._raw.servers()

    @property
    def mode(self) -> str:
        """The mode of the job: ``sync``, ``async``, ``bounded`` or ``delta``."""
        return self._raw.mode()

    @property
    def coordinator(self) -> str:
        """The address of server 0."""
        return self._raw.coordinator()

    @property
    def transferred(self) -> tuple[int, int]:
        """Payload bytes sent and received."""
        return self._raw.moved()

    def resume_rounds(self) -> int:
        """Rounds of the job, where this trainer goes on after an earlier process of its rank (mode sync)."""
        return self._raw.resume_rounds()

    def empty(self, shape: int | Sequence[int], dtype: Any = numpy.float32) -> Any:
        """An array in memory of the library, its contents unspecified. Over shared memory servers read gradients in it
        without a copy. It is a numpy array, and of ``"bfloat16"`` a :class:`Tensor`."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape {sizes}; expected sizes of 0 or more")
        if isinstance(dtype, str) and dtype == "bfloat16":
            return self._raw.buffer(sizes, dtype)
        kind = numpy.dtype(dtype)
        count = int(numpy.prod(sizes, dtype=numpy.int64))
        made: NDArray[Any] = numpy.frombuffer(cast(Any, self._raw.buffer([max(1, count * kind.itemsize)], None)), kind, count)
        return made.reshape(sizes)

    def register(self, array: Array, replicas: Iterable[Array] = (), *, stream: Stream = None) -> None:
        """Registers memory of a CUDA device, which then may stand in :meth:`push`, :meth:`pull`, :meth:`push_pull`, in
        the same calls started, and in :meth:`set`: through pages of the host, as large, that are made here. Of memory
        of the host a network card moves gradients without a copy. The array is kept until :meth:`unregister`.

        Arrays of the device have DLPack or ``__cuda_array_interface__``. They are read and written in the order of the
        stream that a call names, which waits for the one that computes them; of a call without one in the order of
        ``stream``, which the program makes wait for the others, or else of the default stream, which waits as well.
        ``replicas`` are on other devices, without a stream: a gradient is the sum of all, and a value is written to
        all."""
        self._raw.register(array, list(replicas), _stream(stream))
        if stream is not None:
            self._streams.append(stream)

    def unregister(self, array: Array) -> None:
        """Ends :meth:`register` of an array, and of its replicas."""
        self._raw.unregister(array)

    def view(self, names: Iterable[str]) -> dict[str, NDArray[Any] | tuple[NDArray[Any], ...]]:
        """Fetches parameters that are not by rows, into memory of the library that may only be read: over shared memory
        it is the servers' own, and nothing is copied. A parameter in several pieces is a tuple of flat arrays.

        The memory stays while one of the arrays, or of those made of them, does. Until then calls that fetch these
        parameters are refused."""
        if isinstance(names, str):
            raise TypeError(f'a text; expected a list of names, ["{names}"]')
        names = list(names)
        viewed = zip(names, self._raw.view(names))
        return {name: _array(all[0]) if len(all) == 1 else tuple(map(_array, all)) for name, all in viewed}

    # The end

    def cancel(self) -> None:
        """Ends the calls of all threads that are in progress: each raises :class:`Cancelled`."""
        self._raw.cancel()

    def leave(self) -> None:
        """This trainer is finished: the others do not wait for it any more."""
        self._raw.leave()

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._is_closed

    def close(self) -> None:
        """Gives up calls that were started and the rank, and ends servers that :func:`connect` has started. A second
        time has no effect."""
        self._is_closed = True
        self._raw.close()
        if self._servers is not None:
            self._servers.stop()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client stays in its process; expected another there: pserver.connect(client.coordinator)")

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A trainer that ends well leaves, so that the others do not wait for it; after an exception they do, for its
        next process."""
        try:
            if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
                self._raw.leave_at_end()
        except Error as failure:
            _logger.warning("this trainer ends without leaving the job, where others may wait for it: %s", failure)
        finally:
            self.close()

    def _facts(self, name: str) -> tuple[numpy.dtype[Any], tuple[int, ...], bool]:
        facts = self._known.get(name)
        if facts is None:
            dtype, shape, is_rows = self._raw.describe(name)
            facts = self._known[name] = (numpy.dtype(dtype), tuple(shape), is_rows)
        return facts

    def _empty_rows(self, name: str, ids: Array) -> Array:
        """A new array for the rows of these ids."""
        dtype, shape, is_rows = self._facts(name)
        if not is_rows:
            raise Refused(f'parameter "{name}" is not sparse: it is sent and fetched as a whole, not by rows')
        ids_shape = tuple(ids.shape) if hasattr(ids, "shape") else (len(ids),)
        return numpy.empty((*ids_shape, *shape[1:]), dtype)

    def _check_rows(self, name: str, ids: Array, rows: Array) -> None:
        """Refuses rows in another arrangement than ids of several dimensions, whose rows would be mistaken."""
        ids_shape, found = tuple(getattr(ids, "shape", ())), tuple(getattr(rows, "shape", ()))
        if len(ids_shape) > 1:
            expected = (*ids_shape, *self._facts(name)[1][1:])
            if found != expected:
                text = f'parameter "{name}": rows of shape {found} for ids of shape {ids_shape}; expected {expected}'
                raise Refused(text)

    def _empty(self, names: Iterable[str]) -> dict[str, Array]:
        """A new array for each parameter's value."""
        made: dict[str, Array] = {}
        for name in names:
            dtype, shape, _ = self._facts(name)
            made[name] = numpy.empty(shape, dtype)
        return made


def connect(
    coordinator: str | None = None,
    *,
    servers: int | Literal["colocated"] | None = None,
    trainers: int | None = None,
    mode: str = "sync",
    checkpoint_dir: str | os.PathLike[str] | None = None,
    arguments: Sequence[str] = (),
    **settings: Any,
) -> Client:
    """A client of a running job, found as the arguments, the environment and the file of ``PSERVER_CONFIG`` say.

    With ``servers``, and where the environment names no job, so many servers are started, for ``trainers`` trainers (1)
    in ``mode``, with ``arguments`` of ``pserver serve``. They end with the client or the program. Under torchrun rank 0
    starts them for all ranks, and they end with torchrun; ``servers="colocated"`` are one on each host, so that hosts
    with a rank each exchange no more than in an all-reduce. With ``checkpoint_dir`` a server that was killed is started
    again. The other settings are those of :class:`Client`; servers that are started have ``encrypt`` too.
    """
    global _last
    if servers is None:
        client = Client(coordinator, **settings)
    elif coordinator is not None:
        raise ValueError("servers and coordinator; expected one: servers are started, or found at an address")
    elif isinstance(servers, str) and servers != "colocated":
        raise ValueError(f"servers={servers!r}; expected a number, or 'colocated'")
    else:
        encrypt = [] if settings.get("encrypt") is None else ["--encrypt", settings["encrypt"]]
        given = {"count": None if servers == "colocated" else servers, "mode": mode, "arguments": [*encrypt, *arguments]}
        given["checkpoint_dir"] = None if checkpoint_dir is None else os.path.abspath(checkpoint_dir)
        client = _client_of_own_servers(given, trainers, settings)
    _last = weakref.ref(client)
    return client


def _client_of_own_servers(given: dict[str, Any], trainers: int | None, settings: dict[str, Any]) -> Client:
    """A client of servers that this job's trainers start, unless the environment names some."""
    is_named, rank, size = _pserver.launched()
    if is_named:
        return Client(**settings)
    if _torchrun.is_worker():
        found = _torchrun.servers({**given, "trainers": trainers if trainers is not None else size or 1})
        with tempfile.NamedTemporaryFile("w", prefix="pserver-") as file:
            file.write(found["token"])
            file.flush()
            return Client(found["address"], token_file=file.name, **settings)
    if trainers is None and ((size or 1) > 1 or (rank or 0) > 0):
        count = given["count"]
        asked, option = ("colocated", "--colocate") if count is None else (count, f"--servers {count}")
        text = f"servers={asked} in trainer {rank} of {size or 'several'}; expected servers for all of them"
        raise Refused(f"{text}: pserver launch {option} ... (docs/LAUNCH.md), or torchrun")
    # This is the only host.
    count = 1 if given["count"] is None else given["count"]
    started = Servers(**{**given, "count": count}, trainers=trainers if trainers is not None else 1)
    try:
        client = Client(started.address, **settings)
    except BaseException:
        started.stop()
        raise
    client._servers = started
    return client


def last_client() -> Client:
    """The client that :func:`connect` made last.

    Raises:
        Refused: there is none.
    """
    client = None if _last is None else _last()
    if client is None:
        raise Refused("there is no client; expected one of pserver.connect(...), which is kept")
    return client


def _array(tensor: _pserver.Tensor) -> NDArray[Any]:
    """A numpy array over a tensor."""
    if 0 in tensor.shape:
        return numpy.empty(tensor.shape, tensor.dtype)
    made: NDArray[Any] = numpy.frombuffer(cast(Any, tensor), tensor.dtype)
    return made.reshape(tensor.shape)


def _split(arrays: Mapping[str, Array]) -> tuple[list[str], list[Array]]:
    """Names and arrays of a mapping, in its order."""
    _check_mapping(arrays)
    return list(arrays), list(arrays.values())


def _check_mapping(arrays: object) -> None:
    """Refuses what is no mapping of names to arrays."""
    if not isinstance(arrays, Mapping):
        raise TypeError(f'an object of type {type(arrays).__name__}; expected arrays by name, {{"w": array}}')


def _ordered(gradients: Mapping[str, Array], out: Mapping[str, Array]) -> dict[str, Array]:
    """The destinations in the order of the gradients."""
    _check_mapping(out)
    if len(gradients) == len(out) and all(name in out for name in gradients):
        return {name: out[name] for name in gradients}
    only = sorted(gradients.keys() ^ out.keys())
    raise Refused(f"gradients and destinations of the same parameters are expected; {only} are on one side only")


def _numbers(rate: float | None, settings: Settings | None) -> tuple[float | None, list[tuple[str, float]]]:
    """What gradients carry, as the library reads it."""
    return rate, [] if settings is None else list(settings.items())


def _stream(stream: Stream) -> int | None:
    """The handle of a stream."""
    if stream is None:
        return None
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol()
        if version != 0:
            raise TypeError(f"a stream of version {version} of __cuda_stream__; expected version 0")
    else:
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if not isinstance(handle, int) or isinstance(handle, bool) or handle < 0:
        text = "expected a stream of torch or CuPy, an object with __cuda_stream__, or a handle of 0 or more"
        raise TypeError(f"a stream of {type(stream).__name__} {stream!r:.100}; {text}")
    return handle


def _seconds(time: float | str | None) -> str | None:
    """A time as the library reads it."""
    return time if time is None or isinstance(time, str) else f"{round(time * 1000)}ms"
