"""Samplers choose the samples of a rank and their order."""

from trainkit.data.samplers.inference import InferenceSampler
from trainkit.data.samplers.infinite import InfiniteSampler
from trainkit.data.samplers.training import TrainingSampler
from trainkit.utils.plugins import lazy_names

__all__ = [
    "GroupedBatchSampler",
    "InferenceSampler",
    "InfiniteSampler",
    "RandomSubsetTrainingSampler",
    "RepeatFactorTrainingSampler",
    "TrainingSampler",
]

__getattr__ = lazy_names(__name__, "GroupedBatchSampler", "RandomSubsetTrainingSampler", "RepeatFactorTrainingSampler")
