"""What a CUDA graph does, on the CPU: records the operations of torch, executes none, and repeats them on a replay.

Also what it does not: Python and its numbers are not repeated, values cannot be read, nothing new comes from the host.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainkit.projects.graph import GraphAMPTrainer, GraphTrainer

# they wait for the device, and CUDA refuses them during a capture
_READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "lift_fresh",
}
_GARBAGE = 0x7F  # of every byte: a number in no type that a test would take for a result


class CpuRecorder:
    """Counts in ``num_recorded`` and ``num_replays`` what it has done."""

    def __init__(self):
        self.num_recorded = self.num_replays = 0

    @contextmanager
    def beside(self, inputs=()):
        yield

    @contextmanager
    def watching(self, found):
        with Watching(found):
            yield

    def record(self, work):
        rng_state = torch.get_rng_state()
        operations = Operations()
        with operations:
            work()
        operations.undo()
        torch.set_rng_state(rng_state)
        self.num_recorded += 1

        def replay():
            self.num_replays += 1
            operations.replay()

        return replay


class Watching(TorchDispatchMode):
    """Adds to ``found`` the operations that wait for the device."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.found += [name] * (name in _READS)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._calls = []  # (function, args, kwargs, results that are no views of an argument)
        self._former = {}  # storage -> (itself, a copy): what the work has found
        self._own = {}  # storage -> itself: what the work has made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        given = self._storages(args, kwargs)
        for key, storage in given.items():
            if key not in self._own and key not in self._former:
                self._former[key] = (storage, storage.clone())
        results = func(*args, **kwargs)
        made = [
            result
            for result in _tensors(results)
            if result.untyped_storage().data_ptr() not in given
        ]
        self._own.update(self._storages(made))
        self._calls.append((func, args, kwargs, results, made))
        return results

    @staticmethod
    def _storages(*values):
        storages = [tensor.untyped_storage() for tensor in _tensors(values)]
        return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}

    def undo(self):
        for storage, former in self._former.values():
            storage.copy_(former)
        for storage in self._own.values():
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_GARBAGE)

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, results, made in self._calls:
            news = func(*args, **kwargs)
            for result, new in zip(_tensors(results), _tensors(news), strict=True):
                if any(result is each for each in made):
                    result.copy_(new)


def _tensors(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class RecordedTrainer(GraphTrainer):
    """`GraphTrainer` as it is on CUDA; ``recorder`` counts."""

    def make_recorder(self):
        self.recorder = CpuRecorder()
        return self.recorder


class RecordedAMPTrainer(RecordedTrainer, GraphAMPTrainer):
    pass
