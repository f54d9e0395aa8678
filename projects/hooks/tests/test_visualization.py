from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.job import tiny_cfg
from tests.two_ranks import on_two_ranks
from tests.utils.png import decode_png
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import VISUALIZER_REGISTRY, CallbackHook, VisualizationHook
from trainkit.engine.loop import TrainerBase
from trainkit.evaluation import inference_on_dataset, observe_inference
from trainkit.utils.events import EventStorage


def gray(value):
    return np.full((2, 4, 3), value, np.uint8)


def draw_number(inputs, outputs):
    """For batches that are numbers."""
    return gray(inputs)


@VISUALIZER_REGISTRY.register()
def draw_logits(inputs, outputs):
    """For the job of `tests.engine.job`: a row per sample, a column per class."""
    return outputs.softmax(dim=1).mul(255).to(torch.uint8)[..., None].expand(-1, -1, 3)


def evaluate(hooks, batches=range(4), phase="val", name="cats", model=str):
    trainer = TrainerBase()
    trainer.iter = 7
    trainer.register_hooks(hooks)
    with observe_inference(trainer, phase):
        inference_on_dataset(model, batches, None, name=name)


def values(folder):
    """The first value of each picture, by its name."""
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    return {name: decode_png((folder / name).read_bytes())[0, 0, 0] for name in found}


def test_every_period_th_batch_becomes_a_png_file_named_after_where_it_is_from(tmp_path):
    hook = VisualizationHook(draw_number, 3, tmp_path)
    evaluate([hook], range(7))
    evaluate([hook], range(3), "test", "dogs/small set")
    cats = {f"val/cats_iter0000007_batch000{batch}.png": batch for batch in (2, 5)}
    assert values(tmp_path) == {"test/dogs_small_set_iter0000007_batch0002.png": 2, **cats}


def test_several_images_of_a_batch_are_numbered_and_the_open_storage_gets_them_too(tmp_path):
    buffer = gray(0)

    def draw(inputs, outputs):
        buffer[:] = inputs  # the array of the batch before
        return [buffer, torch.from_numpy(buffer) + 1] if inputs == 3 else buffer

    with EventStorage(7) as storage:
        evaluate([VisualizationHook(draw, 2, tmp_path, phases="val")])
        evaluate([VisualizationHook(draw, 2, tmp_path, phases="test")])

    expected = {"val/cats_batch0001": 1, "val/cats_batch0003_0": 3, "val/cats_batch0003_1": 4}
    assert {image.name: image.tensor[0, 0, 0].item() for image in storage.images()} == expected
    assert storage.images()[0].tensor.shape == (3, 2, 4)
    assert values(tmp_path) == {
        name.replace("cats_", "cats_iter0000007_") + ".png": expected[name] for name in expected
    }


def test_random_numbers_of_the_drawing_change_no_output(tmp_path):
    def draw_noise(inputs, outputs):
        return (torch.rand(2, 4, 3) * 255).to(torch.uint8)

    def outputs_beside(hook):
        torch.manual_seed(1)
        seen = []
        spy = CallbackHook(
            after_eval_step=lambda trainer, phase, index, inputs, outputs: seen.append(outputs)
        )
        evaluate([hook, spy], model=lambda inputs: torch.rand(1).item())
        return seen

    careless = CallbackHook(
        after_eval_step=lambda trainer, phase, index, inputs, outputs: draw_noise(None, None)
    )
    undisturbed = outputs_beside(CallbackHook())
    assert (
        outputs_beside(VisualizationHook(draw_noise, 1, tmp_path))
        == undisturbed
        != outputs_beside(careless)
    )


def test_a_config_switches_it_on_for_validation_and_test(tmp_path):
    entry = {"NAME": "VisualizationHook", "DRAW": "draw_logits", "PERIOD": 3}
    DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", [entry], "DATASETS.VAL", ("tiny_val",))).train()
    val = [f"val/tiny_val_iter{iteration}_batch0002.png" for iteration in ("0000004", "0000010")]
    assert [*values(tmp_path / "visualization")] == [
        "test/tiny_test_iter0000010_batch0002.png",
        *val,
    ]


def test_each_image_is_called_as_its_sample(tmp_path):
    hook = VisualizationHook(
        lambda inputs, outputs: [gray(0), gray(1)], 1, tmp_path, names="file_name"
    )
    names = ["frankfurt/000.png", "a b", 7]
    evaluate(
        [hook],
        [{"file_name": names}, [{"file_name": name} for name in names]],
        model=lambda inputs: inputs,
    )
    batches = [f"val/cats_iter0000007_batch000{batch}" for batch in (0, 1)]
    assert [*values(tmp_path)] == [
        f"{batch}_{name}.png" for batch in batches for name in ("000", "a_b")
    ]


def draw_on_a_rank(rank, folder):
    hook = VisualizationHook(lambda inputs, outputs: gray(10 * rank), 1, Path(folder) / "drawn")
    evaluate([hook], range([2, 1][rank]))


@pytest.mark.slow
def test_each_rank_draws_batches_of_its_own_into_files_of_its_own(tmp_path):
    on_two_ranks([draw_on_a_rank], tmp_path)
    drawn = {"batch0000": 0, "batch0000_rank1": 10, "batch0001": 0}
    expected = {f"val/cats_iter0000007_{name}.png": value for name, value in drawn.items()}
    assert values(tmp_path / "drawn") == expected
