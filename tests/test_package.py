"""The wheel holds all of the package and nothing else, and works where the source tree is not."""

import compileall
import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath

import pytest

from tests.capability_names import CAPABILITIES

ROOT = Path(__file__).parents[1]

USE = """
import sys
sys.path.insert(0, sys.argv[1])
import importlib, importlib.metadata, json
for name in sys.argv[2:]:
    importlib.import_module(name)
import trainkit
places = {str(module.__file__) for name, module in sys.modules.items() if name.startswith("trainkit")}
print(json.dumps([trainkit.__version__, importlib.metadata.version("trainkit"), sorted(places)]))
"""

TRAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import json
from types import SimpleNamespace
import torch
from torch import nn
import trainkit
from trainkit.config import get_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, SimpleTrainer, default_setup, hooks
from trainkit.modeling import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class Weight(nn.Module):
    def __init__(self, cfg=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, target):
        return ((self.weight - target) ** 2).mean()


model = Weight()
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
trainer = SimpleTrainer(model, [torch.tensor([1.0])], optimizer)
trainer.register_hooks([hooks.IterationTimer()])
trainer.train(0, 3)
found = [model.weight.item()]

DatasetCatalog.register("ones", lambda: [torch.tensor(1.0)] * 8)
cfg = get_cfg()
cfg.OUTPUT_DIR, cfg.MODEL.NAME, cfg.MODEL.DEVICE, cfg.SEED = sys.argv[2], "Weight", "cpu", 0
cfg.DATASETS.TRAIN = ("ones",)
cfg.DATALOADER.NUM_WORKERS = int(sys.argv[3])
cfg.SOLVER.IMS_PER_BATCH = 4
cfg.SOLVER.BASE_LR, cfg.SOLVER.MOMENTUM, cfg.SOLVER.WEIGHT_DECAY = 0.25, 0.0, 0.0
cfg.SOLVER.WARMUP_ITERS, cfg.SOLVER.LR_SCHEDULER_NAME = 0, "WarmupMultiStepLR"
cfg.SOLVER.STEPS = ()
cfg.HOOKS = [{"NAME": "EMAHook", "DECAY": 0.5}]
for max_iter, resume in ((2, False), (4, True)):
    cfg.SOLVER.MAX_ITER = max_iter
    default_setup(cfg, SimpleNamespace(resume=resume))
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.train()
    found += [trainer.start_iter, trainer.model.weight.item()]
files = [str(module.__file__) for name, module in sys.modules.items() if name.startswith("trainkit")]
print(json.dumps([found, sorted(file[-4:] for file in {*files})]))
"""


def pip(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "pip", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_metadata_and_the_readme_name_the_pythons_on_which_the_tests_run():
    metadata = (ROOT / "setup.py").read_text()
    named = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', metadata)
    assert named == ["10", "11", "12", "13"]
    assert str(sys.version_info.minor) in named
    assert 'python_requires=">=3.10"' in metadata
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "Python 3.10 or newer" in readme
    assert 'target-version = "py310"' in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def source(tmp_path):
    """A copy of all that could get into a wheel, of another version."""
    source = tmp_path / "source"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("trainkit", "tests", "tools", "projects"):
        shutil.copytree(ROOT / name, source / name, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    init = source / "trainkit/__init__.py"
    init.write_text(re.sub(r'(__version__ = )".+"', r'\1"9.8.7"', init.read_text()))
    return source


# To ask importlib for pip here would make setuptools leave distutils alone, which torch.compile imports.
@pytest.mark.slow
@pytest.mark.skipif("pip" not in packages_distributions(), reason="needs pip")
def test_the_wheel_is_the_package_and_works_without_the_source(source, tmp_path):
    sources = {
        "trainkit": source / "trainkit",
        "trainkit_selfsup": source / "projects/trainkit_selfsup",
    }
    expected = {package: files_below(folder) - {"README.md"} for package, folder in sources.items()}
    for name in CAPABILITIES:
        code = {
            file
            for file in files_below(source / "projects" / name)
            if file.endswith((".py", ".css", ".js"))
            and not {"tests", "configs"} & {*PurePosixPath(file).parts}
        }
        expected["trainkit"] |= {f"projects/{name}/{file}" for file in code}
    # pip gets setuptools, into an environment of its own
    pip("wheel", "--no-deps", "--wheel-dir", tmp_path, source)
    [wheel] = tmp_path.glob("*.whl")
    shutil.rmtree(source)
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", tmp_path / "site", wheel)

    assert wheel.name == "trainkit-9.8.7-py3-none-any.whl"
    paths = [PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert {path.parts[0] for path in paths} == {
        "trainkit",
        "trainkit_selfsup",
        "trainkit-9.8.7.dist-info",
    }
    assert {"py.typed", "engine/train_loop.py"} < expected["trainkit"]
    assert {"py.typed", "odc.py"} < expected["trainkit_selfsup"]
    assert {package: files_below(tmp_path / "site" / package) for package in expected} == expected

    modules = ["trainkit", "trainkit.engine", "trainkit_selfsup"]
    modules += [f"trainkit.projects.{name}" for name in CAPABILITIES]
    done = subprocess.run(
        [sys.executable, "-I", "-c", USE, tmp_path / "site", *modules],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    version, version_of_metadata, places = json.loads(done.stdout)
    assert version == version_of_metadata == "9.8.7"
    assert {place[: len(str(tmp_path / "site"))] for place in places} == {str(tmp_path / "site")}


@pytest.mark.slow
def test_the_package_trains_without_its_sources(tmp_path):
    """Some programs are shipped as ``.pyc`` files alone. Half of the distance to 1 is left after each step."""
    site = tmp_path / "site"
    ignore = shutil.ignore_patterns("__pycache__", "tests", "configs", "*.egg-info")
    shutil.copytree(ROOT / "trainkit", site / "trainkit", ignore=ignore)
    for name in CAPABILITIES:
        shutil.copytree(ROOT / "projects" / name, site / "trainkit/projects" / name, ignore=ignore)
    assert compileall.compile_dir(site, quiet=2, legacy=True)
    for source in site.rglob("*.py"):
        source.unlink()

    done = subprocess.run(
        [sys.executable, "-I", "-c", TRAIN, site, tmp_path / "output", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found, endings = json.loads(done.stdout.splitlines()[-1])
    assert found == [1 - 0.5**3, 0, 1 - 0.5**2, 2, 1 - 0.5**4]
    assert {*endings} == {".pyc"}
