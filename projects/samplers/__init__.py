"""More samplers for training, and several loaders as one."""

from trainkit.projects.samplers.combined import CombinedLoader
from trainkit.projects.samplers.grouped import GroupedBatchSampler
from trainkit.projects.samplers.random_subset import RandomSubsetTrainingSampler
from trainkit.projects.samplers.repeat_factor import RepeatFactorTrainingSampler

__all__ = ["CombinedLoader", "GroupedBatchSampler", "RandomSubsetTrainingSampler", "RepeatFactorTrainingSampler"]
