"""Package metadata; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "trainkit/__init__.py").read_text()).group(1)  # type: ignore[union-attr]

TENSORBOARD = ["tensorboard"]
LAZY = ["omegaconf>=2.3", "cloudpickle"]
# the latter: half of the tests' time is that of processes they start
TEST = [
    "pytest",
    "pytest-xdist",
]
TEST += ["ipykernel", "ipywidgets"]  # for the test in a notebook

# examples, which stay in the repository
JOBS = [
    "charlm",
    "digits",
    "segmentation",
    "selfsup",
    "vision_text",
]
# a project is installed as trainkit.projects.NAME, without its tests
PROJECTS = {
    f"trainkit.projects.{name}": f"projects/{name.replace('.', '/')}"
    for name in find_packages("projects", exclude=["*tests*", "trainkit_selfsup", *JOBS])
}

setup(
    name="trainkit",
    version=VERSION,
    description="A small, exact and fast training core for PyTorch in the style of detectron2's engine",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["trainkit", "trainkit.*"]), *PROJECTS, "trainkit_selfsup"],
    package_dir={**PROJECTS, "trainkit_selfsup": "projects/trainkit_selfsup"},
    package_data={
        "trainkit": ["py.typed"],
        "trainkit.projects.plots": ["page.css", "page.js"],
        "trainkit_selfsup": ["py.typed"],
    },
    # torch: from the oldest version on which the tests pass, see CHANGELOG.md; fvcore brings tqdm, for the progress bar
    # PyYAML comes with fvcore; that version merges the keys of "<<: [*a, *b]" in the wrong order, without a word
    install_requires=["torch>=2.13", "numpy", "fvcore", "tabulate", "pyyaml!=6.0.4"],
    extras_require={
        "tensorboard": TENSORBOARD,
        "lazy": LAZY,
        "plot": ["matplotlib", "plotly>=6.3"],
        "models": ["torchvision", "timm", "transformers", "torchmetrics"],
        "sweep": ["optuna>=4"],
        "docs": ["sphinx>=8", "myst-parser", "furo"],
        "wandb": ["wandb>=0.31", "pillow"],  # the latter: wandb takes it for images
        "safetensors": ["safetensors"],
        "onnx": ["onnx", "onnxscript", "onnxruntime"],
        "s3": ["s3fs"],  # addresses of fsspec, which torch brings
        "gs": ["gcsfs"],
        "mlflow": ["mlflow-skinny>=3", "pillow"],
        "test": [*TEST, *TENSORBOARD, *LAZY],
        "dev": [*TEST, *TENSORBOARD, *LAZY, "ruff", "mypy"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        "Programming Language :: Python :: 3",
        # those on which .ci/run has run
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
