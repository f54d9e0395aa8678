"""Trainers that write their metrics themselves: subclasses written for detectron2."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from trainkit.engine.metrics import write_metrics
from trainkit.utils.events import get_event_storage
from trainkit.utils.losses import Losses


class OwnMetrics:
    """If a subclass overrides ``_write_metrics`` or ``write_metrics``, these get the losses in place of the storage."""

    iter: int
    extra: dict[str, Tensor]
    gather_metric_period: Any
    concurrent_executor: Any

    write_metrics = staticmethod(write_metrics)

    def _write_metrics(
        self, loss_dict: Mapping[str, Tensor | float], data_time: float, prefix: str = "", iter: int | None = None
    ) -> None:
        """Call `write_metrics` in iterations whose metrics are gathered, in the worker if ``async_write_metrics``.

        The losses have no graph.
        """
        if ((iter := self.iter if iter is None else iter) + 1) % self.gather_metric_period == 0:
            self.write_metrics(loss_dict, data_time, iter, prefix)

    @cached_property
    def writes_itself(self) -> bool:
        own = getattr(self._write_metrics, "__func__", self._write_metrics)
        return own is not OwnMetrics._write_metrics or self.write_metrics is not write_metrics

    def let_write(self, losses: Losses, data_time: float) -> None:
        if (self.iter + 1) % self.gather_metric_period:
            return
        # copies, since the worker reads them later; `write_metrics` adds up those that require grad
        copies = {name: value.detach().clone() for name, value in losses.values.items()}
        for name in losses.trained:
            copies[name].requires_grad_()
        for name, value in self.extra.items():
            if not name.startswith("[flag]"):
                get_event_storage().put_scalar(name, value)
        if self.concurrent_executor is None:
            self._write_metrics(copies, data_time)
        else:
            self.concurrent_executor.submit(self._write_metrics, copies, data_time, iter=self.iter)
