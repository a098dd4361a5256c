"""The optimizer whose rule runs on servers."""

import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from .._client import Client, last_client
from .._errors import Refused
from ._buffers import Buffers
from ._buckets import Absent, Bucket, Sending, changes_of, in_buckets, wait_all
from ._clipping import Clipping
from ._embedding import Table
from ._rules import Numbers, Rule, rule_of
from ._state import checked, groups_of, load, state_of
from ._steps import Steps, StepState
from ._table_state import checked_rows, load_rows, rows_of
from ._weights import HALVES, Weight, fetch, note

BUCKET_BYTES = 8 << 20
OF_GROUPS = {"params", "param_names", "lr", "initial_lr"}
"""What a group has that is no setting of its rule."""

SCALER = ("grad_scale", "found_inf")
"""What a GradScaler gives an optimizer for a step, and takes back after one that has not failed."""

_owners: "weakref.WeakValueDictionary[int, Optimizer]" = weakref.WeakValueDictionary()
"""The optimizers of parameters, by the tensors' identities."""


class Optimizer(torch.optim.Optimizer):
    """An optimizer whose rule runs on servers.

    ``params`` are parameters, named parameters, or groups with settings of their own, as for PyTorch's optimizers;
    those of :class:`Embedding` are tables of rows. ``rule`` is a name of :data:`RULES`, or a configuration in text such
    as ``rule: '...'`` or ``rule_file: 'mine.rule'``. The learning rate of each group goes with each step, and so do
    other settings where they change, so PyTorch's schedulers work. ``client`` is the last one of
    :func:`pserver.connect` unless it is given.

    ``max_norm`` scales the gradients of a step, merged over all trainers, so that their norm is at most that.
    ``wire``, such as ``torch.bfloat16``, is the type in which gradients travel. ``overlap`` sends gradients while the
    backward pass goes on, in buckets of ``bucket_bytes`` and more; a backward pass that is not the last one before
    :meth:`step` then belongs in :meth:`no_sync`, and gradients are not to be changed between the two.

    The persistent buffers of the model ``buffers`` are at the servers too, for :func:`follow`, :func:`save_model` and
    :func:`load_model`: as the first trainer has them, until one calls :meth:`set_buffers`. Trainers that join, also
    again, begin with those.

    Other settings are PyTorch's of the rule: ``sgd``: ``momentum=0.0, dampening=0.0, weight_decay=0.0,
    nesterov=False``; ``adam``: ``betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, amsgrad=False``; ``adamw``: the same
    with ``weight_decay=0.01``; ``adagrad``: ``lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0,
    eps=1e-10``; ``adadelta``: ``rho=0.9, eps=1e-06, weight_decay=0.0``; ``rmsprop``: ``alpha=0.99, eps=1e-08,
    weight_decay=0.0, momentum=0.0, centered=False``; ``lion``: ``betas=(0.9, 0.99), weight_decay=0.0``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: str = "sgd",
        lr: float = 1e-3,
        *,
        client: Client | None = None,
        max_norm: float | None = None,
        wire: torch.dtype | None = None,
        overlap: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        buffers: torch.nn.Module | None = None,
        **settings: Any,
    ) -> None:
        self._is_declared = False
        self.rule = rule
        super().__init__(params, {"lr": lr, **rule_of(rule, settings).settings})
        self.client = client if client is not None else last_client()
        self._clipping = None if max_norm is None else Clipping(max_norm)
        self.weights: list[Weight] = []
        self._tables: list[tuple[int, Table]] = []
        self._of_model = Buffers(buffers)
        self._steps = Steps(StepState([], Sending(Absent.NOTHING, wire)))
        self._preparing = threading.Lock()
        self._is_syncing = True
        self._spoilt: str | None = None
        """Why no step can follow."""
        self._rules: list[Rule] = []
        """The rules of the groups."""
        configs = self._read_groups(bucket_bytes if overlap else None)
        self._check_owners()
        if self.client._initialise(lambda: self._declare(configs)):
            note(self.weights)
        else:
            self._check_job(configs)
            self.fetch_weights()
            self._of_model.install(self._of_model.fetched(self.client))
            self._warn_of_earlier()
        self.client._has_optimizer = True
        _owners.update({id(tensor): self for tensor in self._tensors()})
        for _, table in self._tables:
            table.bind(self.client, self._steps)
        self._is_declared = True
        self._stand_in_states()
        self._is_alone = self.client.trainers == 1
        self._overlaps = overlap
        self._step.how = Sending(self._absent(), wire)
        if overlap:
            self._hook()

    def _read_groups(self, bucket_bytes: int | None) -> dict[str, str]:
        """Finds the weights and tables of the groups; returns the configuration of each by its name."""
        configs: dict[str, str] = {}
        for number, (group, members) in enumerate(zip(self.param_groups, list(self._named()))):
            rule = rule_of(self.rule, {key: value for key, value in group.items() if key not in OF_GROUPS})
            self._rules.append(rule)
            configs.update({name: rule.at_rate(group["lr"]) for name, _ in members})
            # A parameter without elements has nothing to train.
            dense = [(name, tensor) for name, tensor in members if not Table.is_of(tensor) and tensor.numel() > 0]
            weights = [Weight(name, tensor) for name, tensor in dense]
            self._tables += [(number, Table.of(tensor, name)) for name, tensor in members if Table.is_of(tensor)]
            self.weights += weights
            whole = [Bucket(number, weights)]
            buckets = whole if bucket_bytes is None else in_buckets(number, weights, bucket_bytes)
            self._step.buckets += buckets
        if len(configs) < sum(len(group["params"]) for group in self.param_groups):
            raise Refused("two parameters have one name; expected a name of its own for each")
        return configs

    def _named(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Each group's parameters and their names: without any, places in the model, which are those of one group."""
        for number, group in enumerate(self.param_groups):
            where = "" if len(self.param_groups) == 1 else f"group.{number}."
            names = group.get("param_names") or [f"{where}parameter.{at}" for at in range(len(group["params"]))]
            yield list(zip(names, group["params"]))

    def _check_owners(self) -> None:
        """Refuses a job, and parameters, that another optimizer of an open client has."""
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        for tensor in tensors:
            other = _owners.get(id(tensor))
            if other is not None and not other.client.is_closed and any(tensor is one for one in other._tensors()):
                raise Refused("a parameter of the model has another optimizer; expected one optimizer for each")
        if any(other.client is self.client for other in _owners.values()):
            text = "expected one, with groups for the parameters of all models, or a client of another job"
            text = f"{text}; where a notebook's cell is run again, `del optimizer` or connect() before it"
            raise Refused(f"this client's job has another optimizer; {text}")

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (tensor for group in self.param_groups for tensor in group["params"])

    def _declare(self, configs: Mapping[str, str]) -> None:
        """Declares parameters and tables in a job that this trainer initialises."""
        self._check_mode()
        client = self.client
        for weight in self.weights:
            client.init(weight.name, weight.value(), configs[weight.name] + self._stage)
            if self._clipping is not None:
                self._clipping.declare(client, weight.name)
        for _, table in self._tables:
            table.declare(client, configs[table.name] + self._stage)
            if self._clipping is not None:
                self._clipping.declare(client, table.name)
        self._of_model.declare(client)

    def _check_job(self, configs: Mapping[str, str]) -> None:
        """Refuses a job that another trainer has initialised with another optimizer."""
        self._check_mode()
        for weight in self.weights:
            self.client.check_optimizer(weight.name, configs[weight.name] + self._stage)
        for _, table in self._tables:
            self.client.check_optimizer(table.name, table.config(configs[table.name] + self._stage))
            table.check_type(self.client)
        own = {weight.name for weight in self.weights} | {table.name for _, table in self._tables}
        own |= self._of_model.held().keys()
        if self._clipping is not None:
            own |= self._clipping.parts(own)
        if lacking := [name for name in self.client._raw.names() if name not in own]:
            text = "expected the same parameters and buffers=model at every trainer, as servers wait for all gradients"
            raise Refused(f"this optimizer lacks {lacking[:5]}, which the job has; {text}")

    def _absent(self) -> Absent:
        if self._is_alone or self.client.mode == "async":
            return Absent.NOTHING
        return Absent.PASS if self.client.mode == "sync" else Absent.ZEROS

    def _warn_of_earlier(self) -> None:
        """Says that the model has got what an earlier optimizer of this program has trained."""
        if self.client._has_optimizer:
            text = "an earlier optimizer of this client has trained this job: the model has got its weights"
            text = f"{text}, and the rule goes on with its state"
            remedy = "for another experiment expected another pserver.connect(...)"
            warnings.warn(f"{text}; {remedy}, or set_weights() of the model's own", stacklevel=4)

    def _check_mode(self) -> None:
        if self.client.mode == "delta":
            text = "in which servers only add what trainers send; expected sync, async or bounded"
            raise Refused(f"an optimizer on servers in mode delta, {text}")

    @property
    def _stage(self) -> str:
        """What servers do with a gradient before the rule."""
        return "" if self._clipping is None else f" {self._clipping.stage}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, before the job is initialised: by the constructor."""
        if self._is_declared:
            raise Refused("a group after initialisation; expected all groups with the optimizer's construction")
        super().add_param_group(param_group)

    @property
    def _step(self) -> StepState:
        return self._steps.current

    @property
    def _buckets(self) -> list[Bucket]:
        return self._steps.current.buckets

    # Overlap

    def _hook(self) -> None:
        this = weakref.ref(self)
        # The last bucket of a group is complete when the backward pass ends: its gradients go with the step. A group of
        # one bucket may be of any layer, unless it is the only one.
        lasts = {bucket.group: bucket for bucket in self._buckets}
        several = {bucket.group for bucket in self._buckets if bucket is not lasts[bucket.group]}
        for number, bucket in enumerate(self._buckets):
            if bucket is lasts[bucket.group] and (bucket.group in several or len(lasts) == 1):
                continue
            for at, weight in enumerate(bucket.weights):

                def completed(_: torch.Tensor, number: int = number, at: int = at) -> None:
                    optimizer = this()
                    if optimizer is not None and optimizer._is_syncing:
                        bucket = optimizer._steps.current.buckets[number]
                        if bucket.completed(at):
                            optimizer._completed(bucket, at)

                # Frozen weights have no gradients to wait for.
                if weight.tensor.requires_grad:
                    weight.tensor.register_post_accumulate_grad_hook(completed)  # type: ignore[no-untyped-call]

    def _completed(self, bucket: Bucket, at: int) -> None:
        if self.client.is_closed:
            return
        step = self._step
        if bucket.is_started or bucket.is_prepared:
            # Of a bucket that is only prepared, the step sends what there is then.
            step.is_held, bucket.is_prepared = step.is_held or bucket.is_prepared, False
            bucket.forget_gradients()
            text = "expected step() after a backward pass; earlier ones belong in `with optimizer.no_sync():`"
            raise Refused(f'parameter "{bucket.weights[at].name}": a gradient after it was sent; {text}')
        if not step.is_held:
            try:
                # A backward pass over several devices has a thread for each.
                with self._preparing:
                    bucket.find(self.client, step.how)
                    bucket.is_prepared = True
                    step.prepared.append(bucket)
                    self._start_prepared()
            except Refused:
                # The step refuses it, before it sends what is left: it finds these gradients again, corrected ones too.
                step.is_held = True
                for one in step.prepared:
                    one.is_prepared = False

    def _start_prepared(self) -> None:
        """Starts to send the buckets that the backward pass has prepared, in their order: those whose gradients are in
        the host's memory. The step sends the others."""
        step = self._step
        while step.prepared and not step.is_held and step.prepared[0].is_ready:
            self._prepare(step.prepared[:1])
            step.prepared.pop(0).start(self.client)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes add to gradients and send nothing: for the accumulation of gradients."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    # Steps

    def _numbers(self, group: int) -> Numbers:
        """What gradients of a group carry."""
        return self._rules[group].numbers(self.param_groups[group], "at a step")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Sends gradients and fetches weights. A parameter for which no trainer has a gradient stays as it is; where
        others have one, this trainer's counts as zeros. Weights that the program has changed
        since the last step, as by ``load_state_dict`` or ``clamp_``, become the job's first, as by
        :meth:`set_weights`.

        All is checked before anything is sent: servers have nothing of a step that is refused, except what the
        backward pass has sent with ``overlap``. A step that failed later is repeated by another :meth:`step`: no
        gradient is applied twice."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = self._step
        try:
            self._run_step()
            return loss
        except BaseException:
            for name in SCALER:
                vars(self).pop(name, None)
            if self._step is not before:
                self._step.sent_before = self._gradients()
            raise

    def _gradients(self) -> list[tuple[torch.Tensor | None, int]]:
        """The gradients that there are, and how often each was changed."""
        gradients = (weight.tensor.grad for weight in self.weights)
        return [(gradient, changes_of(gradient)) for gradient in gradients]

    def _is_repetition(self) -> bool:
        """Whether the last call was interrupted after the step's end, and has sent the gradients that there are."""
        before, self._step.sent_before = self._step.sent_before, None
        if before is None or any(table.has_gradients for _, table in self._tables):
            return False
        now = self._gradients()
        return all(one is other and count == changed for (one, count), (other, changed) in zip(before, now))

    @torch.no_grad()
    def _run_step(self) -> None:
        if self._spoilt is not None:
            raise Refused(self._spoilt)
        if self._is_repetition():
            return
        for bucket in self._buckets:
            bucket.settle()
        self._check_numbers()
        self._read_scaler()
        self._check_gradients()
        self._step.has_failed = True
        self._prepare_step()
        for _, table in self._tables:
            table.start_push()
        self._exchange()
        for _, table in self._tables:
            table.wait_push()
        self._begin_next()

    def _prepare_step(self) -> None:
        """Checks all that is left to send, and says what to do where servers have a part of the step already."""
        self._step.prepared.clear()
        try:
            for group, table in self._tables:
                table.prepare_push(self._numbers(group), self._step.how.absent)
            self._prepare([bucket for bucket in self._buckets if not bucket.is_on_its_way])
        except Refused as error:
            if not self._is_in_step:
                raise
            text = "servers have other gradients of this step: with a corrected one, such as zeros, step() completes it"
            raise Refused(f"{error}; {text}") from error

    @torch.no_grad()
    def _prepare(self, buckets: list[Bucket]) -> None:
        """Checks the gradients of buckets, and sends weights that the program has changed. Of an unsure bucket servers
        may have gradients already, which come before."""
        for bucket in buckets:
            if not bucket.is_found(self._step.how):
                bucket.find(self.client, self._step.how)
        changes = [weight for bucket in buckets if not bucket.is_unsure for weight in bucket.changed_weights()]
        for bucket in buckets:
            bucket.check(self.client, self._numbers(bucket.group))
        if not changes:
            return
        if not self._is_alone and self.client.mode != "sync":
            text = "where other trainers change it too; expected set_weights(), which makes this trainer's the job's"
            raise Refused(f'parameter "{changes[0].name}" was changed in mode {self.client.mode}, {text}')
        self._set(changes)

    def _begin_next(self) -> None:
        """The next step begins, for all buckets and tables at once."""
        self._steps.current = self._steps.current.following()
        for _, table in self._tables:
            table.begin_step()

    def _exchange(self) -> None:
        try:
            self._send()
            for bucket in self._buckets:
                bucket.end_fetch()
        except BaseException:
            # After an interrupt nothing writes weights any more.
            for bucket in self._buckets:
                bucket.cancel()
            for bucket in self._buckets:
                bucket.give_up()
            raise
        # The values are computed without changes after the gradient was sent.
        changes, self._step.replaced = self._step.replaced, []
        if changes:
            text = "expected it before the backward pass or after step(), or overlap=False"
            text = f"{text}; it has the job's value again, and another step() completes this one"
            raise Refused(f'parameter "{changes[0].name}" was changed after its gradient was sent; {text}')

    def _send(self) -> None:
        """Sends what is left, and waits until servers have all of it."""
        for bucket in self._buckets:
            if not bucket.is_on_its_way:
                # Values that wait for the norm come later. Where servers may have the gradients already, weights may have
                # been changed since.
                bucket.start(self.client, fetches=self._clipping is None and not bucket.is_unsure)
        if self._clipping is not None and not self._step.has_norm:
            # Servers update when they have the norm.
            for _, table in self._tables:
                table.wait_push()
            sent = [weight.name for bucket in self._buckets for weight in bucket.sent]
            self._clipping.run(self.client, sent + [table.name for _, table in self._tables if table.is_sent])
            self._step.has_norm = True
        # Values of gradients that a backward pass has sent come while the others' gradients leave.
        for bucket in self._buckets:
            bucket.start_fetch(self.client, self._step.replaced)
        wait_all(self._buckets)

    def _check_numbers(self) -> None:
        every = [self._numbers(group) for group in range(len(self.param_groups))]
        for bucket in self._buckets:
            sent, now = bucket.numbers, every[bucket.group]
            if bucket.is_started and sent.rate != now.rate:
                text = f"a learning rate of {now.rate} after gradients were sent with {sent.rate}"
                raise Refused(f"{text}; expected it to be set before the backward pass, or overlap=False")
            if bucket.is_started and sent.settings != now.settings:
                text = f"settings {now.settings} after gradients were sent with {sent.settings}"
                raise Refused(f"{text}; expected them to be set before the backward pass, or overlap=False")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether PyTorch's GradScaler leaves scaled gradients to :meth:`step`. Otherwise it would not see rows and
        gradients that are sent, and other trainers not that a step is left out."""
        return bool(self._tables) or self._overlaps or not self._is_alone

    def _read_scaler(self) -> None:
        """Takes the scale of a GradScaler's step, which also says whether gradients are infinite by it. A step that
        failed keeps its scale."""
        scale, found = (getattr(self, name, None) for name in SCALER)
        if found is None:
            return
        is_void, step = float(found) != 0, self._step
        if self._tables or self._overlaps or (is_void and step.how.absent == Absent.ZEROS):
            text = "expected bfloat16, or dense parameters without overlap, in mode sync or async"
            text = f"gradients of a GradScaler; {text}"
            if any(bucket.is_started for bucket in step.buckets):
                # The scale is not known before, and not undone by what follows.
                text = f"{text}; the backward pass has sent gradients with their scale, so the job's weights are wrong"
                self._spoilt = f"{text}: expected another job, as by a new pserver.connect(...), from a checkpoint"
                raise Refused(self._spoilt)
            raise Refused(text)
        step.how = step.how._replace(factor=1.0 if scale is None else 1 / float(scale), is_void=is_void)

    def _check_gradients(self) -> None:
        changed = [(bucket, bucket.changed()) for bucket in self._buckets if bucket.is_started]
        others = [(bucket, weight) for bucket, weight in changed if weight is not None]
        if others:
            for bucket, _ in others:
                bucket.forget_gradients()
            text = "expected those that were sent, with which another step() completes this one"
            raise Refused(f'parameter "{others[0][1].name}": another gradient after servers got one; {text}')

    @property
    def total_norm(self) -> float:
        """The norm of all gradients of the last step, before they were scaled to ``max_norm``."""
        if self._clipping is None:
            raise Refused("this optimizer computes no norm; expected one with max_norm")
        return self._clipping.total_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As PyTorch's; gradients of rows that were not sent are dropped. A step that failed, and of which servers may
        have a part, it completes in a job of one trainer."""
        if self._is_in_step:
            if self._spoilt is not None:
                raise Refused(self._spoilt)
            if not (self._step.has_failed and self._is_alone):
                raise Refused("servers have gradients of this step, or may; expected step(), which completes it")
            self._run_step()
        self._begin_next()
        super().zero_grad(set_to_none)
        for _, table in self._tables:
            table.forget_gradients()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an optimizer stays with its job; expected its state_dict() where a copy is to be kept")

    # State

    def state_dict(self, *, tables: bool = False) -> dict[str, Any]:
        """The groups, and the state of each parameter as servers have it, in PyTorch's layout: PyTorch's optimizer of
        the same name loads it. Any trainer may call it, alone or with others. In mode sync all of it is after the same
        step; in others each parameter is whole by itself. With ``tables`` it has the rows of tables too, with their ids
        and states: of those that this trainer's memory takes. Without, they are in the servers' checkpoints."""
        self._check_rest()
        found = {tensor: state_of(self.client, weight, rule) for rule, tensor, weight in self._placed()}
        if tables:
            placed = self._placed_tables()
            found.update({tensor: rows_of(self.client, table, rule) for rule, tensor, table in placed})
        stand_ins, self.state = self.state, defaultdict(dict, {of: state for of, state in found.items() if state})
        try:
            return {**super().state_dict(), "rule": self.rule}
        finally:
            self.state = stand_ins

    def _stand_in_states(self) -> None:
        """Empty states for those that servers have: where ``torch.distributed.checkpoint`` finds none, it makes a step
        to have some."""
        self.state = defaultdict(dict, {tensor: {} for tensor in self._tensors()})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes a state the job's: one of :meth:`state_dict`, also of a job with other servers and trainers, or one of
        PyTorch's optimizer of the same name. All of it is checked before any is replaced. One trainer calls it while
        the others wait; in mode sync all may, each before its next step. The settings become those of the state, except
        for one that makes another rule, such as ``amsgrad``, which is refused. The weights stay
        (:meth:`set_weights`), and so do rows of tables that the state does not have."""
        self._checked_state(state_dict)()
        fetch(self.client, (weight for weight in self.weights if weight.tensor.dtype in HALVES))

    def _checked_state(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Checks a state; returns what loads it."""
        self._check_rest()
        groups = groups_of(state_dict, self.rule, self._rules, self.param_groups)
        keys = (key for group in groups for key in group["params"])
        states = dict(zip(self._tensors(), (state_dict["state"].get(key, {}) for key in keys)))
        every = [checked(self.client, weight, rule, states[of]) for rule, of, weight in self._placed()]
        tables = [checked_rows(table, rule, states[of]) for rule, of, table in self._placed_tables() if states[of]]

        def load_all() -> None:
            load(self.client, every)
            load_rows(self.client, tables)
            super(Optimizer, self).load_state_dict({"state": {}, "param_groups": groups})
            self._stand_in_states()

        return load_all

    def _placed(self) -> Iterator[tuple[Rule, torch.Tensor, Weight]]:
        """The weights with their rules, in the order of the groups."""
        weights = {weight.tensor: weight for weight in self.weights}
        for rule, group in zip(self._rules, self.param_groups):
            yield from ((rule, tensor, weights[tensor]) for tensor in group["params"] if tensor in weights)

    def _placed_tables(self) -> Iterator[tuple[Rule, torch.Tensor, Table]]:
        """The tables with their rules."""
        for number, table in self._tables:
            tensor = table.stand_in()
            assert tensor is not None, "the groups have it"
            yield self._rules[number], tensor, table

    @property
    def _is_in_step(self) -> bool:
        """Whether servers have gradients of a step that is not complete, or some are on their way."""
        tables = (table.is_started for _, table in self._tables)
        return any(bucket.is_started for bucket in self._buckets) or any(tables)

    def _check_rest(self) -> None:
        if self._is_in_step:
            raise Refused("the state of an optimizer in a step; expected step() before, which sends and fetches all")

    # Values

    def fetch_weights(self) -> None:
        """Fetches the newest weights, as after a restart of this trainer."""
        fetch(self.client, self.weights)

    def set_weights(self) -> None:
        """Makes this trainer's weights the job's, as after ``model.load_state_dict``. One trainer calls it, or all with
        the same weights, each before its next step."""
        self._set(self.weights)

    def set_buffers(self) -> None:
        """Makes the buffers of this trainer's model the job's, for readers and saved models. One trainer calls it,
        between two steps."""
        self._of_model.send(self.client)

    def _set(self, weights: list[Weight]) -> None:
        self.client.set({weight.name: weight.value() for weight in weights})
        note(weights)
