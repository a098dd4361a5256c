"""Tensors of devices through memory of the host: here every tensor counts as one of a device, and its copies end late."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from needs import need_torch

need_torch()

import torch  # noqa: E402

import pserver  # noqa: E402
from pserver.torch import DiLoCo, Embedding, Optimizer, _diloco, _staging  # noqa: E402


class Late(_staging.Copies):
    """Copies that are made when somebody waits for them, or asks for the third time."""

    def __init__(self, copy: Callable[[], None]) -> None:
        super().__init__(None)
        self._copy = copy
        self._asked = 0
        self.is_over = False

    def are_over(self) -> bool:
        self._asked += 1
        if self._asked == 3:
            self.wait()
        return self.is_over

    def wait(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._copy()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Tensors are not here, and the copies of gradients are late: those that were made."""
    made: list[Late] = []

    def bring(block: Any, places: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        into, out_of = [block.tensors[at] for at in places], list(tensors)
        for place in into:
            place.fill_(float("nan"))
        block.copies = Late(lambda: torch._foreach_copy_(into, out_of))
        made.append(block.copies)

    def read(tensor: torch.Tensor) -> tuple[torch.Tensor, Late]:
        # Neither numbers nor rows that a table has.
        into = torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 2**40)
        return into, Late(lambda: into.copy_(tensor))

    monkeypatch.setattr(_staging, "is_here", lambda tensor: False)
    monkeypatch.setattr(pserver.Client, "_hold_plain", lambda *_: None)
    monkeypatch.setattr(_staging.Block, "bring", bring)
    monkeypatch.setattr(_staging, "read", read)
    return made


def model(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5)]
    return torch.nn.Sequential(*layers).to(dtype)


def trained(client: pserver.Client, dtype: torch.dtype, steps: int = 6, **settings: Any) -> list[torch.Tensor]:
    net = model(dtype)
    optimizer = Optimizer(net.parameters(), "adam", lr=0.01, client=client, **settings)
    random = torch.Generator().manual_seed(client.trainer)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 20, generator=random).to(dtype)).square().mean().backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in net.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_weights_are_those_of_tensors_of_the_host(
    overlap: bool, dtype: torch.dtype, wire: torch.dtype | None, elsewhere: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"overlap": overlap, "bucket_bytes": 1000, "wire": wire}
    with pserver.connect(servers=2) as client:
        found = trained(client, dtype, **settings)
    assert all(copies.is_over for copies in elsewhere)
    # Each bucket of each step; without overlap the bucket is the group.
    assert len(elsewhere) == 6 * (2 if overlap else 1)
    monkeypatch.setattr(_staging, "is_here", lambda tensor: True)
    with pserver.connect(servers=2) as client:
        expected = trained(client, dtype, **settings)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_host_memory_is_reused(elsewhere: list[Late], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []
    of_block = _staging.Block.__init__

    def made(block: Any, *arguments: Any) -> None:
        blocks.append(block)
        of_block(block, *arguments)

    monkeypatch.setattr(_staging.Block, "__init__", made)
    with pserver.connect(servers=1) as client:
        trained(client, torch.float32)
    assert len(blocks) == 2, "one for gradients and one for values, for all steps"


def begun(client: pserver.Client, **settings: Any) -> tuple[Optimizer, torch.nn.Sequential]:
    """An optimizer after its first backward pass."""
    net = model(torch.float32)
    optimizer = Optimizer(net.parameters(), "sgd", lr=0.5, client=client, overlap=True, **settings)
    net(torch.ones(8, 20)).square().mean().backward()
    return optimizer, net


def weights_after(change: Callable[[Optimizer, torch.nn.Sequential], None]) -> list[torch.Tensor]:
    """Those of PyTorch's optimizer after the same step."""
    net = model(torch.float32)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5)
    net(torch.ones(8, 20)).square().mean().backward()
    change(optimizer, net)
    optimizer.step()
    return [tensor.detach() for tensor in net.parameters()]


def assert_close(net: torch.nn.Sequential, expected: list[torch.Tensor]) -> None:
    for found, one in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), one, rtol=0, atol=1e-6)


def test_a_gradient_that_changes_before_its_copy_is_over_is_copied_again(elsewhere: list[Late]) -> None:
    def halve(optimizer: Optimizer, net: torch.nn.Sequential) -> None:
        for tensor in net.parameters():
            assert tensor.grad is not None
            tensor.grad.mul_(0.5)

    with pserver.connect(servers=1) as client:
        optimizer, net = begun(client, bucket_bytes=1000)
        assert [copies.is_over for copies in elsewhere] == [False], "the first of two buckets, which is not sent"
        halve(optimizer, net)
        optimizer.step()
        assert_close(net, weights_after(halve))


def test_a_rate_that_was_set_too_late_is_set_back_and_the_step_ends(elsewhere: list[Late]) -> None:
    with pserver.connect(servers=1) as client:
        optimizer, net = begun(client, bucket_bytes=1000)
        elsewhere[0].wait()
        optimizer._start_prepared()
        assert [bucket.is_started for bucket in optimizer._buckets] == [True, False]
        optimizer.param_groups[0]["lr"] = 0.25
        with pytest.raises(pserver.Refused, match="a learning rate of 0.25 after gradients were sent with 0.5"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        assert_close(net, weights_after(lambda optimizer, net: None))


def test_gradients_that_are_not_sent_may_be_left_out(elsewhere: list[Late]) -> None:
    with pserver.connect(servers=1) as client:
        optimizer, net = begun(client, bucket_bytes=1000)
        optimizer.zero_grad()
        net(torch.ones(8, 20)).square().mean().backward()
        optimizer.step()
        assert_close(net, weights_after(lambda optimizer, net: None))


def test_a_second_backward_pass_is_refused_before_the_first_is_sent(elsewhere: list[Late]) -> None:
    with pserver.connect(servers=1) as client:
        _, net = begun(client, bucket_bytes=1000)
        with pytest.raises(pserver.Refused, match="a gradient after it was sent; expected step\\(\\)"):
            net(torch.ones(8, 20)).square().mean().backward()


def test_a_refused_gradient_is_found_again_without_a_version_counter() -> None:
    """``.data`` counts no version, and a narrowed gradient is a copy."""
    with pserver.connect(servers=1) as client:
        net = model(torch.float32)
        optimizer = Optimizer(net.parameters(), "sgd", lr=0.5, client=client, overlap=True, wire=torch.bfloat16)
        before = [tensor.detach().clone() for tensor in net.parameters()]
        net(torch.full((8, 20), float("nan"))).sum().backward()
        with pytest.raises(pserver.Refused, match="the gradient has NaN"):
            optimizer.step()
        for tensor in net.parameters():
            assert tensor.grad is not None
            tensor.grad.data.zero_()
        optimizer.step()
        assert_close(net, before)


def looked_up(client: pserver.Client) -> list[torch.Tensor]:
    torch.manual_seed(4)
    table = Embedding(100, 8, padding_idx=5)
    optimizer = Optimizer(table.named_parameters(), "adagrad", lr=0.1, client=client)
    random = torch.Generator().manual_seed(9)
    batches = [torch.randint(0, 100, (4, 6), generator=random) for _ in range(5)]
    found = []
    for at, ids in enumerate(batches):
        found.append(table(ids).detach().clone())
        assert not table._table._prefetched, "it was used"
        if at + 1 < len(batches):
            table.prefetch(batches[at + 1])
        for factor in (1, 2):
            (table(ids) * factor).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def averaged(client: pserver.Client, **settings: Any) -> list[torch.Tensor]:
    net = model(torch.float32)
    diloco = DiLoCo(net.parameters(), torch.optim.SGD(net.parameters(), lr=0.1), every=2, client=client, **settings)
    for _ in range(6):
        net(torch.ones(8, 20)).square().mean().backward()
        diloco.step()
    diloco.finish()
    return [tensor.detach().clone() for tensor in net.parameters()]


@pytest.mark.parametrize("run", [looked_up, averaged, partial(averaged, fragments=2), partial(averaged, wire=torch.bfloat16)])
def test_tables_and_outer_steps_wait_for_their_copies(
    run: Callable[[pserver.Client], list[torch.Tensor]], elsewhere: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_diloco, "PIECE_ELEMENTS", 700)
    with pserver.connect(servers=2) as client:
        found = run(client)
    monkeypatch.undo()
    with pserver.connect(servers=2) as client:
        expected = run(client)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


KINDS = [(torch.Size(shape), dtype) for shape, dtype in [
    ((3, 5), torch.float32), ((_staging.PACKED_BYTES_MAX,), torch.float32), ((), torch.float64), ((0,), torch.float32),
    ((7,), torch.bfloat16), ((9,), torch.float32),
]]


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4, 5], [5, 0], [2, 4], [1], [3]])
def test_a_copy_writes_only_the_destinations_that_it_names(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_staging, "is_here", lambda tensor: False)
    block = _staging.Block(KINDS, torch.device("cpu"))
    assert [len(block._packed), len(block.tensors)] == [5, 6], "the large one is copied by itself"
    tensors = [torch.full((2, *shape), 1.5 + at, dtype=dtype)[1] for at, (shape, dtype) in enumerate(KINDS)]
    for place in block.tensors:
        place.zero_()
    block.bring(chosen, [tensors[at] for at in chosen])
    for at, (place, tensor) in enumerate(zip(block.tensors, tensors)):
        assert torch.equal(place, tensor if at in chosen else torch.zeros_like(tensor))
        place.neg_()
    block.give(chosen, [tensors[at] for at in chosen])
    for at, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, -(1.5 + at) if at in chosen else 1.5 + at))


def test_adjacent_destinations_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_staging, "is_here", lambda tensor: False)
    block = _staging.Block(KINDS, torch.device("cpu"))
    assert [len(block._runs(places)) for places in ([0, 1, 2, 3, 4, 5], [0, 2], [0, 4], [1])] == [1, 1, 2, 0]


def test_elements_are_converted_to_the_type_of_their_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_staging, "is_here", lambda tensor: False)
    sizes = [11, _staging.PACKED_BYTES_MAX]
    block = _staging.Block([(torch.Size([size]), torch.bfloat16) for size in sizes], torch.device("cpu"))
    tensors = [torch.linspace(-3, 3, size) for size in sizes]
    block.bring([0, 1], tensors)
    for place, tensor in zip(block.tensors, tensors, strict=True):
        assert torch.equal(place, tensor.to(torch.bfloat16))
