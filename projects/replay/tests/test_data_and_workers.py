"""A replay says if the files of a batch, or a module of the project, have changed since the run."""

import os
import re

import pytest

from tests.docs.pages import ROOT
from tests.forked import run_forked, script

SCRIPT = """
import glob, torch
from package.augment import scale
from trainkit.data import DatasetCatalog
from trainkit.projects.replay.tests.job import train

class Scans(torch.utils.data.Dataset):
    paths = sorted(glob.glob("scans/*"))

    def __len__(self):
        return len(self.paths)

    def sample_name(self, index):
        return self.paths[index]

    def __getitem__(self, index):
        numbers = torch.tensor([float(word) for word in open(self.paths[index]).read().split()])
        return {"x": scale(numbers), "label": index % 2}

DatasetCatalog.register("scans", Scans)
own = ("DATASETS.TRAIN", ("scans",), "DATASETS.TEST", (), "DATALOADER.NUM_WORKERS", 1)
train("run", options=(*own, "SOLVER.MAX_ITER", 70, "SOLVER.CHECKPOINT_PERIOD", 70))
"""
AUGMENT = """
def scale(x):
    from . import factor  # only in a loader worker
    return x * factor.VALUE
"""


def of(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (1e9, 1e9))


@pytest.fixture
def project(tmp_path):
    """A run of one epoch. The checkpoint after it has recorded the files of the last 64 of 70 batches."""
    for name, text in {
        "__init__": "",
        "augment": AUGMENT,
        "factor": "VALUE = 1.0",
        "unused": "",
    }.items():
        of(tmp_path / f"package/{name}.py", text)
    for i in range(560):
        of(tmp_path / f"scans/{i}.txt", f"{i / 560} 1 2 3")
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run_forked(script(tmp_path / "train.py"), tmp_path).returncode == 0
    return tmp_path


def replayed(project, iter):
    """The report, and its first two samples."""
    words = [ROOT / "tools/replay.py", "run", "--iter", iter, "--once", "--", "train.py"]
    printed = run_forked(script(*words), project).stdout
    return printed, re.search("8 samples: (.*?), (.*?), ", printed).groups()


def test_changed_modules_and_changed_files_of_the_batch_are_named(project):
    before, (early, old) = replayed(project, 3)
    (size, time) = replayed(project, 40)[1]
    assert "settings, code, versions and machine are as in the run" in before
    assert "files of the batch" not in before
    for name in ("augment", "factor", "unused"):
        of(
            project / f"package/{name}.py",
            (project / f"package/{name}.py").read_text() + "\n# changed\n",
        )
    of(project / size, "0.1234567 1 2 3.5")
    os.utime(project / time, (1e9, 1e9 + 1))
    os.utime(project / old, (1e9, 1e9 + 1))  # not recorded, and older than the run
    os.utime(project / early)

    for iter, changed in ((3, early), (40, f"{size}, {time}")):
        lines = replayed(project, iter)[0].splitlines()
        assert [
            line for line in lines if line.startswith(("not as in", "settings,", "files of"))
        ] == [
            "not as in the run: code: package/augment.py is another one now",
            f"files of the batch that have changed since the run: {changed}",
        ]
