"""Scalars, images and histograms of a run, and the writers that show them."""

from typing import TYPE_CHECKING

from trainkit.utils.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit.utils.events.history import HistoryBuffer
    from trainkit.utils.events.storage import EventStorage, get_event_storage, has_event_storage
    from trainkit.utils.events.tensorboard_writer import TensorboardXWriter
    from trainkit.utils.events.writers import (
        WRITER_REGISTRY,
        CommonMetricPrinter,
        EventWriter,
        JSONWriter,
        estimate_eta_sec,
    )

__all__ = [
    "EventStorage",
    "get_event_storage",
    "has_event_storage",
    "HistoryBuffer",
    "EventWriter",
    "CommonMetricPrinter",
    "ProgressBar",
    "JSONWriter",
    "CSVWriter",
    "TensorboardXWriter",
    "WandbWriter",
    "MLflowWriter",
    "WRITER_REGISTRY",
    "estimate_eta_sec",
]

__getattr__ = lazy_names(__name__, "CSVWriter", "MLflowWriter", "ProgressBar", "WandbWriter")
