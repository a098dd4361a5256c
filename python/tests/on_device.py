"""Steps with memory of a CUDA device, by a driver that is loaded before: run in a process of its own by test_devices."""

import ctypes
import sys
from typing import Any

import numpy as np
import pytest

import pserver

COUNT = 1000
_driver = ctypes.CDLL("libcuda.so.1")


class Managed(ctypes.Structure):
    """`DLManagedTensorVersioned` of DLPack."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    ]


def called(name: str, *arguments: Any) -> None:
    code = getattr(_driver, name)(*arguments)
    assert code == 0, f"{name}: {code}"


class OnDevice:
    """An array of float32 on the device, as a library of arrays has it."""

    def __init__(self) -> None:
        address = ctypes.c_uint64()
        called("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * COUNT))
        self.address, self.streams = address.value, list[Any]()
        self._shape = (ctypes.c_int64 * 1)(COUNT)

    def fill(self, values: Any) -> "OnDevice":
        array = np.full(COUNT, values, np.float32)
        called("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), array.ctypes.data_as(ctypes.c_void_p), array.nbytes)
        return self

    def values(self) -> Any:
        array = np.empty(COUNT, np.float32)
        called("cuMemcpyDtoH_v2", array.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(self.address), array.nbytes)
        return array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.streams.append(stream)
        # The consumer does not take the capsule over, so it is this object's.
        self._managed = made = Managed()
        made.version[:], made.device[:] = (1, 0), (2, 0)
        made.data, made.dimensions, made.code, made.bits, made.lanes = self.address, 1, 2, 32, 1
        made.shape = ctypes.addressof(self._shape)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(made), b"dltensor_versioned", None)


class ByAddress:
    """The same, by its address."""

    def __init__(self, array: OnDevice, **changes: Any) -> None:
        data = (array.address, False)
        whole = {"data": data, "shape": (COUNT,), "typestr": "<f4", "strides": None, "version": 3, **changes}
        self.__cuda_array_interface__ = whole


def refused(text: str, call: Any) -> None:
    with pytest.raises(pserver.Refused, match=text):
        call()


class Stream:
    """A stream that waits for no other one."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        called("cuStreamCreate", ctypes.byref(handle), 1)
        assert handle.value is not None
        self.handle = handle.value

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def filled(self, array: OnDevice, byte: int) -> OnDevice:
        """The array, which the stream fills with this byte."""
        array.fill(float("nan"))
        where, bytes_filled = ctypes.c_uint64(array.address), ctypes.c_size_t(4 * COUNT)
        called("cuMemsetD8Async", where, ctypes.c_ubyte(byte), bytes_filled, ctypes.c_void_p(self.handle))
        return array


def number(byte: int) -> Any:
    """The number that has this byte four times."""
    return np.frombuffer(bytes([byte] * 4), np.float32)[0]


def in_streams(client: pserver.Client, stream: Stream, gradient: OnDevice, value: OnDevice) -> None:
    """A call reads and writes in the order of the stream that it names, or that the array was registered with."""
    before = client.pull(["w"])
    client.set({"w": np.zeros(COUNT, np.float32)})
    expected = np.float32(0)
    for byte, given in enumerate((stream, stream.handle), 0x3D):
        client.register(gradient)
        client.push({"w": stream.filled(gradient, byte)}, stream=given)
        expected += number(byte)
        assert gradient.streams[-1] == stream.handle, "the producer's stream is waited for by this one"
        client.unregister(gradient)
    client.register(gradient, stream=stream)
    client.push({"w": stream.filled(gradient, 0x3F)})
    client.push({"w": ByAddress(stream.filled(gradient, 0x3E), stream=stream.handle)})
    expected = expected + number(0x3F) + number(0x3E)
    stream.filled(value, 0)
    client.pull({"w": value}, stream=stream)
    assert (value.values() == expected).all()
    client.push_pull({"w": stream.filled(gradient, 0x3D)}, {"w": value}, stream=stream)
    client.start_push_pull({"w": stream.filled(gradient, 0x3E)}, {"w": value}, stream=stream).wait()
    client.start_push({"w": stream.filled(gradient, 0x3F)}, stream=stream).wait()
    client.start_pull({"w": value}, stream=stream).wait()
    for byte in (0x3D, 0x3E, 0x3F):
        expected += number(byte)
    assert (value.values() == expected).all()
    for wrong in ("s", -1, True, 1.5, object()):
        with pytest.raises(TypeError, match="expected a stream of torch or CuPy"):
            client.push({"w": gradient}, stream=wrong)
    other = ByAddress(gradient, stream=stream.handle)
    refused("expected its own, or none", lambda: client.push({"w": other}, stream=1))
    client.unregister(gradient)
    client.set(before)


def main() -> None:
    context = ctypes.c_void_p()
    called("cuInit", 0)
    called("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    called("cuCtxPushCurrent_v2", context)
    gradient, value, other = OnDevice().fill(1), OnDevice().fill(0), OnDevice().fill(2)
    with pserver.connect(sys.argv[1], deadline=30) as client:
        client.init_all({"w": np.zeros(COUNT, np.float32)}, "algorithm: 'add'")
        refused("not registered; expected client.register", lambda: client.push({"w": gradient}))
        client.register(gradient)
        client.register(ByAddress(value))
        refused("overlap", lambda: client.register(gradient))
        client.push({"w": gradient})
        assert gradient.streams[-1] == 1, "the default stream waits for the producer's"
        client.pull({"w": value})
        assert (value.values() == 1).all() and (gradient.values() == 1).all()
        gradient.fill(3)
        client.push_pull({"w": gradient}, {"w": ByAddress(value)})
        assert (value.values() == 4).all()
        client.set({"w": value.fill(7)})
        assert (client.pull(["w"])["w"] == 7).all()
        call = client.start_push_pull({"w": gradient.fill(5)}, {"w": value})
        call.wait()
        assert (value.values() == 12).all()
        client.start_push({"w": ByAddress(gradient)}).wait()
        client.start_pull({"w": value}).wait()
        assert (value.values() == 17).all()
        refused("of a device", lambda: client.push_rows("w", np.zeros(1, np.int64), gradient))
        refused("of a CUDA device", lambda: client.load({"w": ByAddress(value)}))
        refused("follow one another", lambda: client.push({"w": ByAddress(value, strides=(8,))}))
        refused("elements of \"<c8\"", lambda: client.push({"w": ByAddress(value, typestr="<c8")}))
        refused("expected one to write", lambda: client.pull({"w": ByAddress(value, data=(value.address, True))}))
        client.unregister(gradient)
        stream = Stream()
        in_streams(client, stream, gradient, value)
        refused("not registered", lambda: client.push({"w": gradient}))
        client.register(gradient.fill(1), [other])
        client.pull({"w": gradient})
        assert (gradient.values() == 17).all() and (other.values() == 17).all()
        refused("a stream for memory with replicas", lambda: client.push({"w": gradient}, stream=stream))
        with_replicas = {"w": gradient}
        host = {"w": np.ones(COUNT, np.float32)}
        refused("a stream for memory with replicas", lambda: client.push_pull(host, with_replicas, stream=stream))
        assert (client.pull(["w"])["w"] == 17).all(), "nothing was sent"
        refused("expected none", lambda: client.register(value, [other], stream=stream))
        refused("does not know it", lambda: client.register(ByAddress(value, data=(4096, False))))
    print("trained")


if __name__ == "__main__":
    main()
