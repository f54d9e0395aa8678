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
from trainkit.utils.plugins import lending

__all__ = [
    "EventStorage",
    "get_event_storage",
    "has_event_storage",
    "HistoryBuffer",
    "EventWriter",
    "JSONWriter",
]
__all__ += ["CommonMetricPrinter", "WRITER_REGISTRY", "estimate_eta_sec"]

__getattr__, __dir__ = lending(__name__)
