"""MMSelfSup's five hooks for any model that has the attributes they need. Importing this registers them for HOOKS.

This package is not a part of ``trainkit``: no other job needs k-means or a memory of all samples.
"""

from trainkit_selfsup.deepcluster import DeepClusterHook
from trainkit_selfsup.odc import ODCHook, ODCMemory
from trainkit_selfsup.views import DenseCLHook, SimSiamHook, SwAVHook

__all__ = ["DeepClusterHook", "DenseCLHook", "ODCHook", "ODCMemory", "SimSiamHook", "SwAVHook"]
