"""A pretend GPU for tests: its memory is the host's, and all its streams, the current one too, run later than they are asked.

Every rank (a thread) has a GPU of its own. Work on a stream runs when somebody waits for the stream or one of its events, as late
as CUDA allows ("late"). Streams besides the default one may instead run as soon as the events that they wait for have happened
("early"). What is right on both is ordered by streams and events, and not by luck. A copy takes one second of the GPU's clock.
"""

import bisect
import contextlib
import ctypes
import itertools
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import torch

from foremoe.testing import transfer_cases, transfer_drills
from foremoe.transfer import cupy_peer

_number = itertools.count(1)
_lock = threading.RLock()
_here = threading.local()  # streams of this thread that are current, innermost last


class PretendGpu:
    """Streams by the rank that made them, page locks, and a clock."""

    def __init__(self, order):
        self.order, self.streams, self.default, self.seconds, self.copies_left = order, {}, {}, Counter(), 10**9
        self.cudart, self.runtime, self.blocks, self.copied_bytes = PretendCudart(), PretendRuntime(), {}, []

    def stream(self):
        rank, current = _rank(), getattr(_here, "current", ())
        if current:
            return current[-1]
        with _lock:
            if rank not in self.default:
                self.default[rank] = PretendStream()
            return self.default[rank]

    @contextlib.contextmanager
    def on(self, stream):
        _here.current = [*getattr(_here, "current", ()), stream or self.stream()]
        try:
            yield
        finally:
            _here.current = _here.current[:-1]

    def synchronize(self, device=None):
        for stream in [stream for stream in list(self.streams.values()) if stream.rank == _rank()]:
            stream.synchronize()

    def allocate(self, values):
        """A device allocation, which stays until the end of the test: no address is given out twice."""
        (block,) = on_gpu([values.clone()])
        with _lock:
            self.blocks[block.data_ptr()] = block
        return block

    def copying(self, copy):
        """A copy as work for a stream; one after `copies_left` others fails to be queued."""
        self.copies_left -= 1
        if self.copies_left < 0:
            raise RuntimeError("the link is down")

        rank = _rank()

        def work():
            self.seconds[rank] += 1
            copy()

        return work

    def allocation(self, pointer):
        """Base and bytes of the allocation that a pointer is in."""
        bases = sorted(self.blocks)
        base = bases[bisect.bisect(bases, pointer) - 1]
        return base, self.blocks[base].nbytes

    def proceed(self):
        """Lets streams run ahead."""
        while self.order == "early" and any(
            stream.step() for stream in list(self.streams.values()) if stream not in self.default.values()
        ):
            pass


class PretendStream:
    """Work in the order in which it was queued."""

    def __init__(self, device=None, priority=0):
        self.device, self.rank = torch.device("cuda", 0), _rank()
        self.queue, self.num_done, self.cuda_stream = [], 0, next(_number)
        gpu.streams[self.cuda_stream] = self

    def put(self, work, after=None):
        """Queues a call; `after` is an event that must have happened."""
        with _lock:
            self.queue.append((work, after))
            gpu.proceed()

    def step(self):
        """Runs the next call, if it can run; True if it did."""
        if self.num_done == len(self.queue):
            return False
        work, after = self.queue[self.num_done]
        if after is not None and not after.query():
            return False
        self.queue[self.num_done] = None  # what it held may go
        self.num_done += 1
        work()
        return True

    def record_event(self, event=None):
        event = event or PretendEvent()
        event.record(self)
        return event

    def wait_event(self, event):
        self.put(lambda: None, event if event.stream is not self else None)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self, until=None):
        with _lock:
            until = len(self.queue) if until is None else until
            while self.num_done < until:
                after = self.queue[self.num_done][1]
                if after is not None:
                    after.synchronize()
                self.step()
            gpu.proceed()


class PretendEvent:
    stream, place, seconds = None, 0, None

    def __init__(self, enable_timing=False):
        self.timed = enable_timing

    def record(self, stream=None):
        self.stream = stream or gpu.stream()
        self.stream.put(lambda: setattr(self, "seconds", gpu.seconds[self.stream.rank]))
        self.place = len(self.stream.queue)

    def query(self):
        return self.stream is None or self.stream.num_done >= self.place

    def synchronize(self):
        if self.stream is not None:
            self.stream.synchronize(self.place)

    def elapsed_time(self, end):
        assert self.timed and end.timed and self.query() and end.query()
        return 1e3 * (end.seconds - self.seconds)


class PretendTensor(torch.Tensor):
    """Device memory: what writes to it, and copies out of it, is queued on the current stream."""

    is_cuda = True
    device = torch.device("cuda", 0)
    later = frozenset({"copy_", "fill_", "zero_", "add_", "__setitem__"})

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "to" and cls.device in args:
            return args[0]
        if name in ("cpu", "to"):
            gpu.stream().synchronize()
            return raw(args[0]).clone()
        if name == "cat":
            return cls._cat([raw(part) for part in args[0]])
        if name not in cls.later:
            return super().__torch_function__(func, types, args, kwargs)
        given = [raw(value) if isinstance(value, torch.Tensor) else value for value in args]
        host = any(type(value) is torch.Tensor for value in args)
        non_blocking = kwargs.pop("non_blocking", False)

        def work():
            with torch.no_grad():
                func(*given, **kwargs)

        if name == "copy_":
            gpu.copied_bytes.append(args[0].nbytes)
        gpu.stream().put(gpu.copying(work) if name == "copy_" else work)
        if host and not non_blocking:
            gpu.stream().synchronize()
        return args[0]

    @staticmethod
    def _cat(parts):
        (out,) = on_gpu([torch.cat(parts)])
        raw(out).fill_(7)
        gpu.stream().put(lambda: torch.cat(parts, out=raw(out)))
        return out


def raw(tensor):
    """The memory itself, whatever is queued."""
    return getattr(tensor, "memory", tensor).as_subclass(torch.Tensor)


def on_gpu(tensors):
    return [raw(tensor).as_subclass(PretendTensor) for tensor in tensors]


class PretendCudart:
    """Page locks by address."""

    def __init__(self):
        self.locked, self.num_locks, self.error = {}, 0, 0

    def cudaHostRegister(self, address, size, flags):
        if self.error:
            return self.error
        assert address % 4096 == 0 and address not in self.locked and flags == 1
        self.locked[address] = size
        self.num_locks += 1
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


class PretendRuntime:
    """CuPy's: copies between GPUs by address, allocations, and their handles.

    Attributes:
        freed_open: allocations that were freed while another process had them open.
        shareable: whether torch's allocations have handles; None: nothing has.
    """

    memcpyDeviceToDevice = 3

    def __init__(self):
        self.opened, self.closed, self.shareable, self.malloced, self.freed = [], [], True, {}, []
        self.freed_open = []

    def memcpyAsync(self, dst, src, size, kind, stream):
        assert kind == 3

        gpu.streams[stream].put(gpu.copying(lambda: ctypes.memmove(dst, src, size)))

    def ipcGetMemHandle(self, base):
        assert base in gpu.blocks
        if not self.shareable and (base not in self.malloced or self.shareable is None):
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        return base.to_bytes(64, "little")

    def malloc(self, size):
        base = gpu.allocate(torch.zeros(size, dtype=torch.uint8)).data_ptr()
        self.malloced[base] = size
        return base

    def free(self, base):
        assert base in self.malloced
        self.freed.append(base)
        if self.opened.count(base) > self.closed.count(base):
            self.freed_open.append(base)

    def ipcOpenMemHandle(self, handle):
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def ipcCloseMemHandle(self, base):
        self.closed.append(base)


class PretendMemory(transfer_cases.Memory):
    """A rank's memory in the conformance suite, on the pretend GPU."""

    def allocate(self, contents):
        return gpu.allocate(contents)


gpu = PretendGpu("late")
_empty = torch.empty


def empty(*size, device=None, **options):
    """Memory of the device holds what nobody expects."""
    if torch.device(device or "cpu").type != "cuda":
        return _empty(*size, device=device, **options)
    return on_gpu([_empty(*size, **options).fill_(7)])[0]


def install(monkeypatch, order="late"):
    """Puts the pretend GPU in place of torch.cuda."""
    gpu.__init__(order)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", gpu.on)
    monkeypatch.setattr(torch.cuda, "Stream", PretendStream)
    monkeypatch.setattr(torch.cuda, "Event", PretendEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.stream())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: gpu.cudart)
    cupy = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True, runtime=gpu.runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy_peer, "_allocation", gpu.allocation)
    for module in (transfer_cases, transfer_drills):
        monkeypatch.setattr(module, "Memory", PretendMemory)
    return gpu


def _rank():
    """The rank that a thread works for; a store's filling has a thread of its own."""
    return threading.current_thread().name.partition(",")[0]
