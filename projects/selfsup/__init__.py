"""Features of digits without labels, by five methods. Importing it registers the datasets, models and hooks."""

from projects.selfsup.backbone import Backbone, SelfSupModel, mlp, pool
from projects.selfsup.clustering import kmeans, normalized_mutual_info
from projects.selfsup.data import TwoViews, load_frozen, load_unlabeled
from projects.selfsup.deepcluster import DeepCluster, DeepClusterHook
from projects.selfsup.densecl import DenseCL, DenseCLHook
from projects.selfsup.evaluation import FrozenFeatureEvaluator
from projects.selfsup.odc import ODC, Memory, ODCHook
from projects.selfsup.simsiam import SimSiam
from projects.selfsup.swav import SwAV, SwAVHook

__all__ = [
    "Backbone",
    "DeepCluster",
    "DeepClusterHook",
    "DenseCL",
    "DenseCLHook",
    "FrozenFeatureEvaluator",
    "Memory",
    "ODC",
    "ODCHook",
    "SelfSupModel",
    "SimSiam",
    "SwAV",
    "SwAVHook",
    "TwoViews",
    "kmeans",
    "load_frozen",
    "load_unlabeled",
    "mlp",
    "normalized_mutual_info",
    "pool",
]
