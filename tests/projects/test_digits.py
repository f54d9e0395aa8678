from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from projects.digits import DigitsCNN, DigitsTrainTransform, DigitsTransform, load_split
from tests.docs.pages import blocks, run
from tools import train_net
from trainkit.engine import default_argument_parser
from trainkit.utils.logger import close_logger

FOLDER = Path(__file__).parents[2] / "projects" / "digits"
(RULE,) = blocks("projects/digits/README.md", "python")


def test_the_split_is_complete_disjoint_and_stratified_and_the_script_of_the_readme_makes_the_file(
    tmp_path, monkeypatch
):
    with np.load(FOLDER / "digits.npz") as file:
        arrays = dict(file)
    counts = [np.bincount(arrays["labels"][arrays["split"] == part], minlength=10).tolist() for part in range(3)]
    assert counts[1:] == [[20] * 10, [40] * 10]
    assert [sum(count) for count in counts] == [1197, 200, 400]
    assert len(np.unique(arrays["images"].reshape(1797, 64), axis=0)) == 1797  # no scan is in two parts

    monkeypatch.chdir(tmp_path)
    digits = SimpleNamespace(images=arrays["images"].astype(float), target=arrays["labels"].astype(int))  # as there
    run(RULE.replace("from sklearn.datasets import load_digits\n", ""), "README.md", load_digits=lambda: digits)
    with np.load("digits.npz") as made:
        assert {name: array.dtype for name, array in made.items()} == dict.fromkeys(arrays, np.dtype("uint8"))
        assert all(np.array_equal(made[name], arrays[name]) for name in arrays)


def test_the_augmentation_is_small_and_a_function_of_the_torch_seed():
    sample = load_split("train")[0]
    plain, augment = DigitsTransform()(sample)["image"], DigitsTrainTransform()
    torch.manual_seed(0)
    first, second = augment(sample)["image"], augment(sample)["image"]
    torch.manual_seed(0)
    assert torch.equal(augment(sample)["image"], first)
    assert not torch.equal(first, second)
    assert (list(first.shape), first.dtype) == ([1, 8, 8], torch.float32)
    assert 0 < (first - plain).abs().mean() < 0.2


def test_the_model_gives_losses_in_train_mode_and_logits_in_eval_mode():
    torch.manual_seed(0)
    model = DigitsCNN(width=4)
    batch = {"image": torch.rand(3, 1, 8, 8), "label": torch.tensor([0, 1, 2])}
    losses = model(batch)
    assert list(losses) == ["loss_cls"]
    assert losses["loss_cls"].requires_grad
    model.eval()
    logits = model({"image": batch["image"]})
    expected = torch.nn.functional.cross_entropy(logits, batch["label"], label_smoothing=0.1)
    assert list(logits.shape) == [3, 10]
    assert model.losses(batch)["loss_cls"].item() == pytest.approx(expected.item())


@pytest.mark.slow
def test_the_last_checkpoint_of_the_job_without_arguments_reads_99_percent_of_the_test_digits(tmp_path):
    options = ["OUTPUT_DIR", str(tmp_path), "LOG.WRITERS", "['json']"]
    trained = train_net.main(default_argument_parser().parse_args(options))
    weights = ["MODEL.WEIGHTS", str(tmp_path / "model_final.pth")]
    evaluated = train_net.main(default_argument_parser().parse_args(["--eval-only", *options, *weights]))
    close_logger()
    assert evaluated == trained
    assert trained["classification"]["top1"] >= 99.0
