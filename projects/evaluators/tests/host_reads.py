"""What an evaluator may not do in ``process``: wait for the device."""

from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts the operations whose result or size the host has to wait for."""

    WAITING = frozenset(("_local_scalar_dense", "nonzero", "bincount", "masked_select"))

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in self.WAITING
        return func(*args, **(kwargs or {}))
