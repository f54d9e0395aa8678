"""Record work of a GPU and repeat it; and the signature of a batch."""

import sys
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from trainkit.config import ConfigError
from trainkit.utils import comm

_TORCH = torch.__path__[0]
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)

ADVICE = "or train without a graph (SOLVER.GRAPH.ENABLED False)"


class CudaRecorder:
    """CUDA graphs that share memory: they must be replayed one after the other, in the recorded order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # kept, since torch frees the memory pool with its last graph
        self._newest: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def beside(self, inputs: Sequence[Tensor] = ()) -> Iterator[None]:
        """Context for ordinary steps before a recording; ``inputs`` are the tensors that these steps read."""
        for tensor in inputs:
            # the model may drop the tensor before this stream has read it
            tensor.record_stream(self._stream)
        # autograd continues on the stream of the forward pass, and a recorded stream must not wait for another
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @staticmethod
    @contextmanager
    def watching(found: list[str]) -> Iterator[None]:
        """Context that adds to ``found`` the lines in which the host waits for the device, as a recording cannot."""
        mode = torch.cuda.get_sync_debug_mode()
        is_free = sys.getprofile() is None  # else a profiler is at work

        def note(frame: FrameType, event: str, call: Any) -> None:
            # of a device or an event: torch does not warn
            if event == "c_call" and "synchronize" in call.__name__:
                found.append(_line_outside_of_torch(frame))

        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                if is_free:
                    sys.setprofile(note)
                yield
        finally:
            if is_free:
                sys.setprofile(None)
            torch.cuda.set_sync_debug_mode(mode)
        waits = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
        found += [f"{warning.filename}:{warning.lineno}" for warning in waits]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work`` without executing it; the result executes it, on the same tensors."""
        graph = torch.cuda.CUDAGraph()
        with (
            # torch.cuda.graph does not leave its stream if a recording fails
            torch.cuda.stream(self._stream),
            # thread_local: threads that pin memory and read metrics continue to call CUDA
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            work()
        self._newest = graph
        return graph.replay


def _line_outside_of_torch(frame: FrameType) -> str:
    for outer, line in traceback.walk_stack(frame):
        file = outer.f_code.co_filename
        if not file.startswith(_TORCH):
            return f"{file}:{line}"
    return "torch"


def describe(data: Any, tensors: list[Tensor]) -> Hashable | None:
    """The signature of batches; fills ``tensors`` with their tensors. None: some part cannot be compared."""
    if isinstance(data, Tensor):
        if data.layout is not torch.strided or data.is_nested:
            return None
        # a tensor may come twice in a batch: a recording needs one copy of each different tensor
        earlier = None
        for number, tensor in enumerate(tensors):
            if tensor is data:
                earlier = number
                break
        tensors.append(data)
        return data.shape, data.stride(), data.dtype, data.device, earlier
    if isinstance(data, (list, tuple)):
        parts: Iterable[Any] = data
    elif isinstance(data, (dict, Mapping)):
        parts = [*data, *data.values()]
    elif isinstance(data, _CONSTANTS):
        return type(data), data
    else:  # other objects may be equal in each iteration, but hold other tensors
        return None
    found = [describe(part, tensors) for part in parts]
    if None in found:
        return None
    return type(data), *found


def check_recordable(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError if there are several processes, or the update needs the host."""
    if comm.get_world_size() > 1:
        raise ConfigError(
            f"a recorded step takes one process, got {comm.get_world_size()}; use "
            f"MODEL.COMPILE, {ADVICE}"
        )
    if not all(group.get("fused") or "capturable" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"the update by {type(optimizer).__name__} cannot be recorded; use one with fused=True "
            f"(SOLVER.OPTIMIZER.FUSED True) or with the argument capturable, {ADVICE}"
        )
