"""Memory of the library as arrays: views of values and buffers; and states of parameters in half precision."""

import gc
import os
from typing import Any

import numpy as np
import pytest
from needs import need_torch
from test_client import SGD, descriptors, resident

import pserver

COUNT = 10_000 if os.environ.get("PSERVER_FULL") == "1" else 1_000
# A parameter of several chunks, which is in pieces, and one that is whole.
VALUES = {"large": np.arange(3_000_000, dtype=np.float32).reshape(1000, 3000), "small": np.ones((2, 3), np.float64)}


@pytest.mark.parametrize("is_reader", [False, True])
def test_views_are_read_only_and_outlive_their_client(job: Any, is_reader: bool) -> None:
    """A trainer's are the server's memory, a reader's are copies."""
    trainer = job()
    trainer.init_all(VALUES, SGD)
    client = job(reader=True) if is_reader else trainer
    viewed = client.view(VALUES)
    pieces = viewed["large"]
    assert isinstance(pieces, tuple) and len(pieces) > 1
    assert (np.concatenate(pieces) == VALUES["large"].ravel()).all()
    small = viewed["small"]
    assert small.shape == (2, 3) and small.dtype == np.float64 and (small == 1).all()
    for array in (*pieces, small):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(pserver.Refused, match="view"):
        client.pull(["small"])
    # Servers write the next version elsewhere.
    trainer.push({name: np.ones_like(value) for name, value in VALUES.items()})
    assert (small == 1).all()
    rest = small[1:]
    del viewed, pieces, small, array
    gc.collect()
    with pytest.raises(pserver.Refused, match="view"):
        client.pull(["small"])
    again = np.from_dlpack(rest)
    del rest
    gc.collect()
    client.close()
    assert again.tolist() == [[1, 1, 1]]


def test_a_released_view_lets_the_parameter_be_fetched(job: Any) -> None:
    client = job()
    client.init_all(VALUES, SGD)
    for step in range(3):
        del_me = client.view(["small"])["small"]
        assert np.allclose(del_me, 1 - 0.1 * step)
        del del_me
        gc.collect()
        client.push_pull({"small": np.ones((2, 3))})
    with pytest.raises(TypeError, match="expected a list of names"):
        client.view("small")
    with pytest.raises(pserver.Refused, match="unknown parameter"):
        client.view(["none"])


def test_memory_and_descriptors_are_flat_over_many_views_and_buffers(job: Any) -> None:
    client = job()
    client.init_all({"w": np.zeros(20_000, np.float32)}, SGD)

    def use() -> None:
        array = client.view(["w"])["w"]
        assert len(np.from_dlpack(array)) == 20_000
        buffer = client.empty((100, 200))
        tensor = client.empty(10_000, "bfloat16")
        capsule = tensor.__dlpack__(max_version=(1, 0))
        assert buffer.size == 20_000 and capsule is not None

    for _ in range(100):
        use()
    gc.collect()
    before, memory = descriptors(), resident()
    for _ in range(COUNT):
        use()
    gc.collect()
    assert descriptors() <= before + 4
    # A buffer of each would be 80 MB in the short form.
    assert resident() < memory + 8_000_000


def test_tensors_go_by_dlpack_without_numpy(job: Any) -> None:
    torch = need_torch()
    client = job()
    value = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    client.init_all({"w": value}, "algorithm: 'add'")
    tensor = client.empty((2, 3), "bfloat16")
    assert isinstance(tensor, pserver.Tensor) and tensor.__dlpack_device__() == (1, 0)
    assert (tensor.shape, tensor.dtype, len(tensor)) == ((2, 3), "bfloat16", 2)
    client.pull({"w": tensor})
    mine = torch.from_dlpack(tensor)
    assert mine.dtype == torch.bfloat16 and torch.equal(mine, value.bfloat16())
    mine[:] = 1
    assert (client.push_pull({"w": tensor})["w"] == value.numpy() + 1).all()
    buffer = torch.from_dlpack(client.empty((2, 3)))
    client.pull({"w": buffer})
    assert torch.equal(buffer, value + 1)
    with pytest.raises(ValueError, match="a stream for memory of the host"):
        tensor.__dlpack__(stream=1)
    with pytest.raises(BufferError, match="a copy"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(pserver.Refused, match="expected the shape"):
        client.pull({"w": client.empty((3, 3), "bfloat16")})


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_states_of_half_precision_gradients_go_out_and_in(job: Any, kind: str) -> None:
    torch = need_torch()
    client, half = job(), getattr(torch, kind)
    client.init_all({"w": np.ones(100, np.float32)}, "sgd { momentum: 0.9 } const_lr { learning_rate: 0.25 }")

    def step() -> Any:
        out = torch.empty(100, dtype=half)
        client.push_pull({"w": torch.full((100,), 0.3, dtype=half)}, {"w": out})
        return out

    step()
    state, value = client.state("w"), client.pull(["w"])["w"]
    assert state.tensors["momentum"].dtype == np.float32
    expected = step()
    halves = {of: torch.from_numpy(tensor).to(half) for of, tensor in state.tensors.items()}
    with pytest.raises(pserver.Refused, match=f"an array of {kind} for state .*expected float32"):
        client.set_state("w", halves, state.updates)
    client.load({"w": value})
    client.set_state("w", state.tensors, state.updates)
    assert torch.equal(step(), expected)
    # A state that was kept in half precision is given in the parameter's type.
    client.set_state("w", {of: tensor.float() for of, tensor in halves.items()}, 1)
    assert client.state("w").updates == 1
