"""The core knows no capability: a capability is a folder of projects, and can be deleted."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.capability_names import CAPABILITIES, JOBS, imported_projects, names_of_capabilities

ROOT = Path(__file__).parents[1]

CORE_TESTS = [
    "engine/test_train_loop.py",
    "engine/test_defaults.py",
    "checkpoint/test_checkpointer.py",
]

OPTIONAL_PACKAGES = {
    "tensorboard",
    "omegaconf",
    "cloudpickle",
    "hydra",
    "matplotlib",
    "plotly",
    "wandb",
}
OPTIONAL_PACKAGES |= {
    "safetensors",
    "onnx",
    "mlflow",
    "torchvision",
    "timm",
    "transformers",
    "pytest",
}
LOADED_PACKAGES = """
from trainkit.engine import SimpleTrainer
import sys
print(*{name.partition(".")[0] for name in sys.modules}, sep="\\n")
"""
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import trainkit
print(trainkit.__file__)
"""


def sources(*folders):
    """The modules below some folders, without tests and without what belongs to ``trainkit.projects``."""
    files = [
        file.relative_to(ROOT)
        for folder in folders
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]
    files = [file for file in files if file.parts[:2] != ("trainkit", "projects")]
    return [
        file for file in files if "tests" not in file.parts and not file.stem.startswith("test_")
    ]


def parsed(files):
    return {file.as_posix(): ast.parse((ROOT / file).read_text()) for file in files}


def test_nothing_in_the_core_imports_a_project():
    found = {
        file: set(imported_projects(tree)) for file, tree in parsed(sources("trainkit")).items()
    }
    assert {file: names for file, names in found.items() if names} == {}


def test_nothing_in_the_core_is_named_after_a_capability():
    trees = parsed(sources("trainkit"))
    found = {file: names_of_capabilities(file, tree) for file, tree in trees.items()}
    assert {file: names for file, names in found.items() if names} == {}


def test_no_text_in_the_core_names_a_project():
    """Also no string, comment or docstring."""
    folders = "|".join([*CAPABILITIES, *JOBS])
    of_project = re.compile(rf"\bprojects[./]({folders})\b")
    found = {
        file.as_posix(): names
        for file in sources("trainkit")
        if (names := of_project.findall((ROOT / file).read_text()))
    }
    assert found == {}


def test_a_name_of_a_capability_and_an_import_of_a_project_are_found():
    for text, names in (
        ("class GraphTrainer: pass", {"GraphTrainer"}),
        ("class A:\n    logical_ranks: int = 0\n    lars = 1", {"logical_ranks", "lars"}),
        ("def save(path, *, to_s3=False): pass", {"to_s3"}),
        (
            "class A:\n    def f(self): self._fsdp = cfg.SOLVER.LAYER_DECAY",
            {"_fsdp", "LAYER_DECAY"},
        ),
        (
            "import os\nos.fork()\nparagraph = biological_layer = tensor = decay_of_layer = 'fork'",
            set(),
        ),
    ):
        assert names_of_capabilities("trainkit/a.py", ast.parse(text)) == names
    for text, imports in (
        ("import trainkit.projects.replay", ["trainkit.projects.replay"]),
        ("def f():\n    from projects.digits import DigitsCNN", ["projects.digits.DigitsCNN"]),
        ("import projects_of\nfrom trainkit.config import projects", []),
    ):
        assert list(imported_projects(ast.parse(text))) == imports


@pytest.mark.slow
@pytest.mark.parametrize("capability", [*CAPABILITIES, "all of them"])
def test_the_core_passes_its_tests_without_a_capability(capability, tmp_path):
    for name in ("trainkit", "tests", "tools", "projects"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    # with the latter the copy is a checkout, which has projects
    for name in (
        "pyproject.toml",
        "setup.py",
    ):
        shutil.copy(ROOT / name, tmp_path)
    for name in CAPABILITIES if capability == "all of them" else [capability]:
        shutil.rmtree(tmp_path / "projects" / name)
    modules = [
        ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        for file in sources("trainkit")
    ]
    tests = [f"tests/{name}" for name in CORE_TESTS]
    imported = run("-c", IMPORT_ALL, *modules, cwd=tmp_path)
    tested = run(
        "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests, cwd=tmp_path
    )
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout == f"{tmp_path / 'trainkit/__init__.py'}\n"
    assert tested.returncode == 0, tested.stdout


def run(*arguments, cwd):
    """Of Python, which looks for modules in ``cwd`` first."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)


@pytest.mark.slow
def test_a_simple_trainer_loads_no_optional_package():
    """The import of `SimpleTrainer` brings the required packages and no package of an extra."""
    done = run("-c", LOADED_PACKAGES, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"torch", "numpy"} <= loaded
    assert loaded & OPTIONAL_PACKAGES == set()
