"""The plugin ``pytest -p tests.fake_cuda.device``: two GPUs in this process, before anybody imports torch.

FAKE_CUDA is the path of the library that `build` has made.
"""

import contextlib
import ctypes
import importlib.util
import itertools
import os
import threading
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

NUM_DEVICES = 2
_PACKAGE = str(Path(__file__).resolve().parents[2] / "trainkit") + os.sep
_SYNC_WARNING = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"


class Wait(NamedTuple):
    """The host has waited for the device: for what, in which thread, and in which file and function of trainkit."""

    what: str
    thread: str
    place: str


waits: list[Wait] = []


def _load():
    library = os.environ["FAKE_CUDA"]
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    ctypes.CDLL(torch_folder / "lib" / "libtorch_python.so", ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library)  # torch asks for its CUDA hooks once, when it is imported
    spec = importlib.util.spec_from_file_location("fake_cuda_device", library)
    module = importlib.util.module_from_spec(spec)
    import torch  # noqa: F401

    spec.loader.exec_module(module)
    return module


native = _load()

import torch  # noqa: E402

_state = {
    "sync_debug": 0,
    "capturing": None,
    "warned": False,
    "is_global": False,
    "is_broken": False,
}
_MODES = ("default", "warn", "error")
_ALLOWED = ("event", "event, spinning", "device", "copy of pageable memory")
_thread = threading.local()


def _on_host_call(what):
    if _state["is_global"] and _state["capturing"] not in (None, threading.get_ident()):
        _state["is_broken"] = True
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")


def _on_wait(what):
    _on_host_call(what)
    if getattr(_thread, "spins", False):
        what = "event, spinning"
    inside = [
        frame
        for frame in traceback.extract_stack()
        if frame.filename.startswith(_PACKAGE) and frame.name != "wait_for"
    ]
    place = f"{Path(inside[-1].filename).name}:{inside[-1].name}" if inside else "elsewhere"
    waits.append(Wait(what, threading.current_thread().name, place))
    if _state["capturing"] == threading.get_ident():
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")
    if _state["sync_debug"] and what not in _ALLOWED:
        if _state["sync_debug"] == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)


class Stream(torch.Stream):
    """``torch.cuda.Stream``, made of the one for any accelerator."""

    def __new__(cls, device=None, priority=0, **kwargs):
        return (
            super().__new__(cls, **kwargs)
            if kwargs
            else super().__new__(cls, _device(device), priority=priority)
        )

    @property
    def cuda_stream(self):
        return self.stream_id


class Event(torch.Event):
    """``torch.cuda.Event``; unless it is ``blocking``, a thread that waits for it spins."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        if enable_timing:  # torch compares its own type only
            return torch.Event("cuda", enable_timing=True, blocking=blocking)
        event = super().__new__(cls, "cuda")
        event.is_blocking = blocking
        return event

    def synchronize(self):
        _thread.spins = not self.is_blocking
        try:
            super().synchronize()
        finally:
            _thread.spins = False


def _clone(storage):
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()
    return copy.copy_(storage)


_pool_numbers = itertools.count(1)
# pool -> number of its graphs; 0: torch has freed it, and does not take it again
_pools = Counter()


class CUDAGraph:
    pool = None

    def replay(self):
        self.operations.replay()

    def __del__(self):
        _pools[self.pool] -= 1


@contextlib.contextmanager
def _graph(graph, pool=None, stream=None, capture_error_mode="global"):
    from trainkit.projects.graph.tests.recorded_graph import Operations

    if pool in _pools and not _pools[pool]:
        raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
    torch.cuda.synchronize()
    graph.pool = pool
    _pools[pool] += 1
    random_state = torch.get_rng_state()
    graph.operations = Operations()
    with _stream(stream), graph.operations:
        _state.update(
            capturing=threading.get_ident(),
            is_global=capture_error_mode == "global",
            is_broken=False,
        )
        try:
            yield
        finally:
            _state["capturing"] = None
        if _state["is_broken"]:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
    graph.operations.undo()
    torch.cuda.synchronize()  # the real device has executed nothing
    torch.set_rng_state(random_state)


def _device(device=None):
    device = (
        torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    )
    return (
        torch.device("cuda", torch.accelerator.current_device_index())
        if device.index is None
        else device
    )


def _current_stream(device=None):
    stream = torch.accelerator.current_stream(_device(device))
    return Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _stream(stream):
    return contextlib.nullcontext() if stream is None else stream


def _set_sync_debug_mode(mode):
    _state["sync_debug"] = _MODES.index(mode) if isinstance(mode, str) else mode
    if not _state["warned"]:  # as torch does
        _state["warned"] = True
        warnings.warn(_SYNC_WARNING, UserWarning, stacklevel=2)


def _memory(name):
    return lambda device=None: getattr(torch.accelerator.memory, name)(_device(device))


_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def _properties(device=None):
    return SimpleNamespace(
        name="fake",
        total_memory=2**30,
        major=9,
        minor=0,
        multi_processor_count=1,
        uuid=f"fake {_device(device).index}",
    )


_stand_ins = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "_is_in_bad_fork": lambda: False,
    "device_count": lambda: NUM_DEVICES,
    "current_device": torch.accelerator.current_device_index,
    "set_device": lambda device: torch.accelerator.set_device_index(_device(device)),
    "synchronize": torch.accelerator.synchronize,
    "Stream": Stream,
    "Event": Event,
    "current_stream": _current_stream,
    "stream": _stream,
    "CUDAGraph": CUDAGraph,
    "graph": _graph,
    "graph_pool_handle": lambda: (0, next(_pool_numbers)),
    "is_current_stream_capturing": lambda: _state["capturing"] == threading.get_ident(),
    "set_sync_debug_mode": _set_sync_debug_mode,
    "get_sync_debug_mode": lambda: _state["sync_debug"],
    "default_generators": tuple(torch.Generator() for _ in range(NUM_DEVICES)),
    "set_per_process_memory_fraction": lambda fraction, device=None: native.set_limit(fraction),
    "memory_summary": lambda device=None: "",
    "empty_cache": torch.accelerator.empty_cache,
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: "fake",
    "get_device_capability": lambda device=None: (9, 0),
    "is_bf16_supported": lambda including_emulation=True: True,
    "_sleep": lambda cycles: native.sleep(cycles / 1e9),
} | {name: _memory(name) for name in _MEMORY}
for _name, _stand_in in _stand_ins.items():
    setattr(torch.cuda, _name, _stand_in)
torch.cuda.random.current_device, torch.cuda.random._lazy_init = (
    torch.cuda.current_device,
    torch.cuda._lazy_init,
)
torch.cuda.random._lazy_call = lambda call, **kwargs: call()
torch.cuda.random.device_count = lambda: NUM_DEVICES
torch._C._cuda_getDeviceCount = lambda: NUM_DEVICES
torch._C._cuda_getCurrentRawStream = lambda device=0: 0
torch._C._cuda_isCurrentStreamCapturing = torch.cuda.is_current_stream_capturing
torch._C._activate_gpu_trace = native.trace
torch.cuda.memory._record_memory_history = lambda enabled="all", max_entries=0: None
torch.cuda.memory._dump_snapshot = lambda file: Path(file).write_bytes(b"")
torch.UntypedStorage.clone = _clone
native.call_on_wait(_on_wait)
native.call_on_host_call(_on_host_call)
