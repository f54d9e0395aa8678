"""Scalars, images and histograms of a run, and the writers that show them."""

from trainkit.utils.events.history import HistoryBuffer
from trainkit.utils.events.storage import EventStorage, get_event_storage, has_event_storage
from trainkit.utils.events.writers import (
    WRITER_REGISTRY,
    CommonMetricPrinter,
    EventWriter,
    JSONWriter,
)
from trainkit.utils.events.writers import estimate_eta_sec as estimate_eta_sec
from trainkit.utils.loading import names_on_demand

_OF_PROJECTS = ["CSVWriter", "MLflowWriter", "ProgressBar", "TensorboardXWriter", "WandbWriter"]

__all__ = [
    "EventStorage",
    "get_event_storage",
    "has_event_storage",
    "HistoryBuffer",
    "EventWriter",
    "JSONWriter",
]
__all__ += ["CommonMetricPrinter", "WRITER_REGISTRY", "estimate_eta_sec", *_OF_PROJECTS]

__getattr__ = names_on_demand(__name__, *_OF_PROJECTS)
