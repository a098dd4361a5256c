"""What a CUDA device and its driver can do, and what one call costs: a JSON line each, by libcuda alone.

    python3 kernels/cu/probe.py [PART...]

Nothing is compiled, and torch is not loaded. Each question stands alone: one that fails is a line with "failed". Each
part has a process of its own, so that none disturbs another. All parts take about 15 s; nothing is set on the device.
The simulated driver answers what it has.
"""

import ctypes as c
import array
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time

u32, u64, size = c.c_uint32, c.c_uint64, c.c_size_t
# The simulated driver copies with the processor: its figures mean nothing, and its copies are few and short.
IS_SMALL = bool(os.environ.get("PSERVER_GPU_STANDIN"))
WHOLE = (4 << 20) if IS_SMALL else (256 << 20)
ATTRIBUTES = {
    "multiprocessors": 16, "l2_bytes": 38, "async_engines": 40, "unified_addressing": 41, "major": 75, "minor": 76,
    "concurrent_managed": 89, "host_pointer_for_registered": 91, "host_register": 99, "vmm": 102, "posix_fd": 103,
    "gdr_with_vmm": 110, "read_only_host_register": 113, "pools": 115, "gpu_direct_rdma": 116, "flush_options": 117,
    "writes_ordering": 118, "dma_buf": 124, "ipc_event": 125, "fabric": 128,
}


def say(**fields):
    print(json.dumps(fields), flush=True)


class Failed(Exception):
    pass


class Driver:
    def __init__(self):
        for name in ("libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"):
            try:
                self.library = c.CDLL(name)
                break
            except OSError:
                continue
        else:
            raise Failed("libcuda.so.1 is nowhere")

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*arguments):
            code = function(*arguments)
            if code != 0:
                text = c.c_char_p()
                self.library.cuGetErrorName(code, c.byref(text))
                raise Failed(f"{name}: {(text.value or b'?').decode()} ({code})")

        setattr(self, name, call)
        return call

    def open(self):
        begin = time.perf_counter()
        self.cuInit(0)
        middle = time.perf_counter()
        self.device, self.context = c.c_int(), c.c_void_p()
        self.cuDeviceGet(c.byref(self.device), 0)
        self.cuDevicePrimaryCtxRetain(c.byref(self.context), self.device)
        self.cuCtxSetCurrent(self.context)
        return middle - begin, time.perf_counter() - middle

    def attribute(self, number):
        value = c.c_int()
        self.cuDeviceGetAttribute(c.byref(value), number, self.device)
        return value.value

    def alloc(self, bytes_):
        address = u64()
        self.cuMemAlloc_v2(c.byref(address), size(bytes_))
        return address

    def pinned(self, bytes_):
        start = c.c_void_p()
        self.cuMemHostAlloc(c.byref(start), size(bytes_), 1)
        c.memset(start, 0x3D, bytes_)
        return start

    def stream(self):
        handle = c.c_void_p()
        self.cuStreamCreate(c.byref(handle), 1)
        return handle

    def event(self, flags=0):
        handle = c.c_void_p()
        self.cuEventCreate(c.byref(handle), flags)
        return handle


def apart(part):
    """Runs a part in a process of its own; the parent never initialises the driver."""
    begin = time.perf_counter()
    child = os.fork()
    if child == 0:
        try:
            part()
        except BaseException as why:  # noqa: BLE001
            say(part=part.__name__, failed=f"{type(why).__name__}: {why}")
        os._exit(0)
    os.waitpid(child, 0)
    say(part=part.__name__, seconds=round(time.perf_counter() - begin, 3))


def device():
    driver = Driver()
    init, context = driver.open()
    version, name = c.c_int(), c.create_string_buffer(128)
    free, total = size(), size()
    driver.cuDriverGetVersion(c.byref(version))
    driver.cuDeviceGetName(name, 128, driver.device)
    driver.cuMemGetInfo_v2(c.byref(free), c.byref(total))
    found = {}
    for word, number in ATTRIBUTES.items():
        try:
            found[word] = driver.attribute(number)
        except Failed as why:
            found[word] = str(why)
    say(device=name.value.decode(), driver=version.value, free=free.value, total=total.value, cuInit_s=round(init, 3),
        context_s=round(context, 3), **found)
    # A second process while this one has the device open: what is left of the start then.
    subprocess.run([sys.executable, os.path.abspath(__file__), "start"], check=False)


def start():
    """Seconds until a process has a context; the driver initialises a device that nobody else has open."""
    driver = Driver()
    init, context = driver.open()
    say(start=os.environ.get("HELD", "?"), cuInit_s=round(init, 3), context_s=round(context, 3))


def busy():
    """GB/s of copies within the device: alone, and while another process does the same. The device gives processes
    turns, so each has half, less what a turn costs."""
    whole, copies = WHOLE, 4 if IS_SMALL else 3000
    ours, theirs = socket.socketpair()
    child = os.fork()
    mine = theirs if child == 0 else ours
    driver = Driver()
    driver.open()
    inside, stream = driver.alloc(2 * whole), driver.stream()

    def run():
        begin = time.perf_counter()
        for _ in range(copies):
            driver.cuMemcpyDtoDAsync_v2(inside, u64(inside.value + whole), size(whole), stream)
        driver.cuStreamSynchronize(stream)
        return 2 * whole * copies / (time.perf_counter() - begin) / 1e9

    run()
    if child == 0:
        mine.recv(1)
        run()
        os._exit(0)
    alone = run()
    mine.send(b"1")
    both = run()
    os.waitpid(child, 0)
    say(copy_within_GBps_alone=round(alone, 1), copy_within_GBps_beside_another_process=round(both, 1))


def median_us(call, count=400):
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times) * 1e6, 2)


def calls():
    """Microseconds of the host for one call; ctypes takes about `nothing` of each."""
    driver = Driver()
    driver.open()
    version, to, host = c.c_int(), driver.alloc(64 << 20), driver.pinned(64 << 20)
    stream, event = driver.stream(), driver.event(2)
    library, into = driver.library, c.byref(version)
    mib, small = size(1 << 20), size(32)
    say(us={
        "nothing": median_us(lambda: library.cuDriverGetVersion(into)),
        "set_context": median_us(lambda: library.cuCtxSetCurrent(driver.context)),
        "record": median_us(lambda: library.cuEventRecord(event, stream)),
        "wait": median_us(lambda: library.cuStreamWaitEvent(stream, event, 0)),
        "query": median_us(lambda: library.cuEventQuery(event)),
        "copy_in_32B": median_us(lambda: library.cuMemcpyHtoDAsync_v2(to, host, small, stream)),
        "copy_in_1MiB": median_us(lambda: library.cuMemcpyHtoDAsync_v2(to, host, mib, stream)),
        "copy_out_1MiB": median_us(lambda: library.cuMemcpyDtoHAsync_v2(host, to, mib, stream)),
    })
    driver.cuStreamSynchronize(stream)
    one = driver.alloc(1 << 20)
    driver.cuMemFree_v2(one)

    def alloc_free():
        driver.cuMemFree_v2(driver.alloc(1 << 20))

    say(us={"alloc_free_1MiB": median_us(alloc_free, 50)})


def link():
    """GB/s over the link by the length of a copy, one way, and both ways at once; 256 MiB each time, by the simulated driver 4."""
    driver = Driver()
    driver.open()
    whole = WHOLE
    inside, outside = driver.alloc(2 * whole), driver.pinned(2 * whole)
    streams = [driver.stream(), driver.stream()]
    begin, end, second = driver.event(), driver.event(), driver.event()
    milliseconds = c.c_float()

    def run(piece, ways):
        driver.cuEventRecord(begin, streams[0])
        driver.cuStreamWaitEvent(streams[1], begin, 0)
        for offset in range(0, whole, piece):
            if "in" in ways:
                driver.cuMemcpyHtoDAsync_v2(u64(inside.value + offset), c.c_void_p(outside.value + offset), size(piece),
                                            streams[0])
            if "out" in ways:
                driver.cuMemcpyDtoHAsync_v2(c.c_void_p(outside.value + whole + offset),
                                            u64(inside.value + whole + offset), size(piece), streams[1])
        driver.cuEventRecord(second, streams[1])
        driver.cuStreamWaitEvent(streams[0], second, 0)
        driver.cuEventRecord(end, streams[0])
        driver.cuStreamSynchronize(streams[0])
        driver.cuEventElapsedTime(c.byref(milliseconds), begin, end)
        return milliseconds.value / 1e3

    for piece in sorted({64 << 10, 256 << 10, 1 << 20, 4 << 20, min(16 << 20, whole), whole}):
        rates = {}
        for name, ways in (("in", ["in"]), ("out", ["out"]), ("each_of_both", ["in", "out"])):
            run(piece, ways)
            rates[name] = round(whole / statistics.median(run(piece, ways) for _ in range(5)) / 1e9, 2)
        say(link_piece=piece, GBps=rates)
    copies = []
    for _ in range(20):
        driver.cuEventRecord(begin, streams[0])
        driver.cuMemcpyDtoDAsync_v2(inside, u64(inside.value + whole), size(whole), streams[0])
        driver.cuEventRecord(end, streams[0])
        driver.cuStreamSynchronize(streams[0])
        driver.cuEventElapsedTime(c.byref(milliseconds), begin, end)
        copies.append(milliseconds.value / 1e3)
    say(copy_within_GBps=round(2 * whole / statistics.median(copies[5:]) / 1e9, 1))


def register():
    """Milliseconds to pin 16 MiB of a memory file: touched or not, and read-only, as another process's memory is."""
    driver = Driver()
    driver.open()
    piece = 16 << 20
    file = os.memfd_create("probe")
    os.ftruncate(file, 8 * piece)
    writable = mmap.mmap(file, 8 * piece, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    start = c.addressof(c.c_char.from_buffer(writable))
    c.memset(start, 1, 4 * piece)

    def pin(index, base=start, flags=1):
        at = c.c_void_p(base + index * piece)
        begin = time.perf_counter()
        driver.cuMemHostRegister_v2(at, size(piece), flags)
        middle = time.perf_counter()
        driver.cuMemHostUnregister(at)
        return round((middle - begin) * 1e3, 2), round((time.perf_counter() - middle) * 1e3, 2)

    say(pin_ms_touched=[pin(index)[0] for index in range(4)], unpin_ms=[pin(index)[1] for index in range(2)],
        pin_ms_fresh=[pin(index)[0] for index in range(4, 8)])
    libc = c.CDLL(None, use_errno=True)
    libc.mmap.restype = c.c_void_p
    libc.mmap.argtypes = [c.c_void_p, size, c.c_int, c.c_int, c.c_int, c.c_long]
    seen = libc.mmap(None, 8 * piece, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    for word, flags in (("plain", 1), ("READ_ONLY", 1 | 8)):
        try:
            say(read_only_mapping=word, pin_ms=pin(0, seen, flags)[0])
        except Failed as why:
            say(read_only_mapping=word, failed=str(why))


class Location(c.Structure):
    _fields_ = [("kind", c.c_int), ("id", c.c_int)]


class Properties(c.Structure):
    _fields_ = [("kind", c.c_int), ("handles", c.c_int), ("location", Location), ("meta", c.c_void_p),
                ("compression", c.c_ubyte), ("gdr", c.c_ubyte), ("usage", c.c_ushort), ("reserved", c.c_ubyte * 4)]


class Access(c.Structure):
    _fields_ = [("location", Location), ("flags", c.c_int)]


def mapped(driver, handle, bytes_):
    address, access = u64(), Access(Location(1, 0), 3)
    driver.cuMemAddressReserve(c.byref(address), size(bytes_), size(0), u64(0), u64(0))
    driver.cuMemMap(address, size(bytes_), size(0), handle, u64(0))
    driver.cuMemSetAccess(address, size(bytes_), c.byref(access), size(1))
    return address


def shared():
    """Device memory of one process in another: by a file descriptor over a socket, and as a handle of CUDA IPC. The
    owner is killed; the other goes on reading."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    driver = Driver()
    if child == 0:
        driver.open()
        prop = Properties(1, 1, Location(1, 0))
        granularity = size()
        driver.cuMemGetAllocationGranularity(c.byref(granularity), c.byref(prop), 0)
        bytes_, handle, file = granularity.value, u64(), c.c_int(-1)
        driver.cuMemCreate(c.byref(handle), size(bytes_), c.byref(prop), u64(0))
        address = mapped(driver, handle, bytes_)
        driver.cuMemsetD8_v2(address, c.c_ubyte(0x5A), size(bytes_))
        driver.cuCtxSynchronize()
        driver.cuMemExportToShareableHandle(c.byref(file), handle, 1, u64(0))
        plain, ipc = driver.alloc(2 << 20), (c.c_ubyte * 64)()
        driver.cuMemsetD8_v2(plain, c.c_ubyte(0x3C), size(2 << 20))
        driver.cuCtxSynchronize()
        driver.cuIpcGetMemHandle(c.byref(ipc), plain)
        theirs.sendmsg([bytes_.to_bytes(8, "little") + bytes(ipc)],
                       [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.value]))])
        time.sleep(60)
        os._exit(0)
    theirs.close()
    ours.settimeout(30)
    message, ancillary, _, _ = ours.recvmsg(72, socket.CMSG_SPACE(4))
    file = array.array("i", ancillary[0][2])[0]
    driver.open()
    byte = (c.c_ubyte * 4)()
    begin = time.perf_counter()
    handle = u64()
    driver.cuMemImportFromShareableHandle(c.byref(handle), c.c_void_p(file), 1)
    address = mapped(driver, handle, int.from_bytes(message[:8], "little"))
    took = time.perf_counter() - begin
    driver.cuMemcpyDtoH_v2(c.byref(byte), address, size(4))
    say(posix_fd="works" if bytes(byte) == b"\x5a" * 4 else f"found {bytes(byte)}", open_ms=round(took * 1e3, 2))

    class Handle(c.Structure):
        _fields_ = [("of", c.c_ubyte * 64)]

    opened = u64()
    try:
        driver.library.cuIpcOpenMemHandle_v2.argtypes = [c.c_void_p, Handle, c.c_uint]
        begin = time.perf_counter()
        driver.cuIpcOpenMemHandle_v2(c.byref(opened), Handle.from_buffer_copy(message[8:72]), 1)
        took = time.perf_counter() - begin
        driver.cuMemcpyDtoH_v2(c.byref(byte), opened, size(4))
        say(cuda_ipc="works" if bytes(byte) == b"\x3c" * 4 else f"found {bytes(byte)}", open_ms=round(took * 1e3, 2))
    except Failed as why:
        say(cuda_ipc="no", failed=str(why))
    os.kill(child, 9)
    os.waitpid(child, 0)
    time.sleep(0.5)
    for word, where in (("posix_fd", address), ("cuda_ipc", opened)):
        try:
            driver.cuMemcpyDtoH_v2(c.byref(byte), where, size(4))
            say(after_the_owner_was_killed=word, found=bytes(byte).hex())
        except Failed as why:
            say(after_the_owner_was_killed=word, failed=str(why))


if __name__ == "__main__":
    parts = {part.__name__: part for part in (device, start, calls, link, register, shared, busy)}
    for name in sys.argv[1:] or parts:
        apart(parts[name])
