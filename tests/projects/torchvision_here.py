"""Makes torchvision and timm importable in a test."""

import importlib.metadata

import pytest
import torch

_OPERATORS = ("nms", "qnms")
_kept = []


def need(*packages):
    """Skip if one is not installed.

    A torchvision for CUDA cannot load its library beside a torch for the CPU, and then imports only if the operators of
    that library are declared. The models need none of them. timm and torchmetrics import it.
    """
    for package in packages:
        if _version(package) is None:
            pytest.skip(f"needs {package} (pip install -e '.[models]')")
    version = _version("torchvision")
    if version is not None and torch.version.cuda is None and "+" not in version and not _kept:
        _kept.append(torch.library.Library("torchvision", "DEF"))
        for name in _OPERATORS:
            _kept[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
