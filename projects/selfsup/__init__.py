"""Features of digits without labels, by five methods. Importing it registers the datasets, models and hooks."""

from projects.selfsup.backbone import Backbone, Head, SelfSupModel, mlp, pool
from projects.selfsup.data import TwoViews, load_frozen, load_unlabeled
from projects.selfsup.deepcluster import DeepCluster
from projects.selfsup.densecl import DenseCL
from projects.selfsup.evaluation import FrozenFeatureEvaluator, normalized_mutual_info
from projects.selfsup.odc import ODC
from projects.selfsup.simsiam import SimSiam
from projects.selfsup.swav import SwAV

__all__ = [
    "Backbone",
    "DeepCluster",
    "DenseCL",
    "FrozenFeatureEvaluator",
    "Head",
    "ODC",
    "SelfSupModel",
    "SimSiam",
    "SwAV",
    "TwoViews",
    "load_frozen",
    "load_unlabeled",
    "mlp",
    "normalized_mutual_info",
    "pool",
]
