"""Samplers choose the samples of a rank and their order."""

from trainkit.data.samplers.grouped import GroupedBatchSampler
from trainkit.data.samplers.inference import InferenceSampler
from trainkit.data.samplers.infinite import InfiniteSampler
from trainkit.data.samplers.repeat_factor import RepeatFactorTrainingSampler
from trainkit.data.samplers.training import RandomSubsetTrainingSampler, TrainingSampler

__all__ = [
    "GroupedBatchSampler",
    "InferenceSampler",
    "InfiniteSampler",
    "RandomSubsetTrainingSampler",
    "RepeatFactorTrainingSampler",
    "TrainingSampler",
]
