from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.docs.pages import blocks, run
from tools import train_net
from trainkit.engine import default_argument_parser

FOLDER = Path(__file__).parents[2] / "projects" / "digits"
(RULE,) = blocks("projects/digits/README.md", "python")


def test_the_split_is_complete_and_stratified_and_the_script_of_the_readme_makes_it(
    tmp_path, monkeypatch
):
    with np.load(FOLDER / "digits.npz") as file:
        arrays = dict(file)
    counts = [
        np.bincount(arrays["labels"][arrays["split"] == part], minlength=10).tolist()
        for part in range(3)
    ]
    assert counts[1:] == [[20] * 10, [40] * 10]
    assert [sum(count) for count in counts] == [1197, 200, 400]
    # no scan is in two parts
    assert len(np.unique(arrays["images"].reshape(1797, 64), axis=0)) == 1797

    monkeypatch.chdir(tmp_path)
    # as there
    digits = SimpleNamespace(
        images=arrays["images"].astype(float), target=arrays["labels"].astype(int)
    )
    run(
        RULE.replace("from sklearn.datasets import load_digits\n", ""),
        "README.md",
        load_digits=lambda: digits,
    )
    with np.load("digits.npz") as made:
        assert {name: array.dtype for name, array in made.items()} == dict.fromkeys(
            arrays, np.dtype("uint8")
        )
        assert all(np.array_equal(made[name], arrays[name]) for name in arrays)


@pytest.mark.slow
def test_the_last_checkpoint_of_the_job_without_arguments_reads_99_percent_of_the_test_digits(
    tmp_path,
):
    options = ["OUTPUT_DIR", str(tmp_path), "LOG.WRITERS", "['json']"]
    trained = train_net.main(default_argument_parser().parse_args(options))
    weights = ["MODEL.WEIGHTS", str(tmp_path / "model_final.pth")]
    evaluated = train_net.main(
        default_argument_parser().parse_args(["--eval-only", *options, *weights])
    )
    assert evaluated == trained
    assert trained["classification"]["top1"] >= 99.0
