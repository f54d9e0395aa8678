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


def trainer_with(*hooks, iter=7):
    trainer = TrainerBase()
    trainer.iter = iter
    trainer.register_hooks(hooks)
    return trainer


def evaluate(trainer, num_batches=4, phase="val", name="cats", model=str):
    with observe_inference(trainer, phase):
        inference_on_dataset(model, range(num_batches), None, name=name)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))


def test_every_period_th_batch_becomes_a_png_file_named_after_where_it_is_from(tmp_path):
    trainer = trainer_with(VisualizationHook(draw_number, 3, tmp_path))
    evaluate(trainer, 7)
    evaluate(trainer, 3, "test", "dogs/small set")

    assert files(tmp_path) == [
        "test/dogs_small_set_iter0000007_batch0002.png",
        "val/cats_iter0000007_batch0002.png",
        "val/cats_iter0000007_batch0005.png",
    ]
    for path in tmp_path.rglob("*.png"):
        assert np.array_equal(decode_png(path.read_bytes()), gray(int(path.stem[-1])))


def test_several_images_of_a_batch_are_numbered_and_the_open_storage_gets_them_too(tmp_path):
    buffer = gray(0)

    def draw(inputs, outputs):
        buffer[:] = inputs  # the array of the batch before
        return [buffer, torch.from_numpy(buffer) + 1] if inputs == 3 else buffer

    with EventStorage(7) as storage:
        evaluate(trainer_with(VisualizationHook(draw, 2, tmp_path, phases="val")), 4)
        evaluate(trainer_with(VisualizationHook(draw, 2, tmp_path, phases="test")), 4)

    names = ["val/cats_batch0001", "val/cats_batch0003_0", "val/cats_batch0003_1"]
    assert [image.name for image in storage.images()] == names
    assert files(tmp_path) == [name.replace("cats_", "cats_iter0000007_") + ".png" for name in names]
    for image, value in zip(storage.images(), (1, 3, 4), strict=True):
        assert torch.equal(image.tensor, torch.full((3, 2, 4), value, dtype=torch.uint8))


def outputs_beside(hook):
    """What a model that draws random numbers returns in an evaluation with this hook."""
    torch.manual_seed(1)
    seen = []
    spy = CallbackHook(after_eval_step=lambda trainer, phase, index, inputs, outputs: seen.append(outputs))
    evaluate(trainer_with(hook, spy), 4, model=lambda inputs: torch.rand(1).item())
    return seen


def draw_noise(inputs, outputs):
    return (torch.rand(2, 4, 3) * 255).to(torch.uint8)


def test_random_numbers_of_the_drawing_change_no_output(tmp_path):
    undisturbed = outputs_beside(CallbackHook())

    assert outputs_beside(VisualizationHook(draw_noise, 1, tmp_path)) == undisturbed
    careless = CallbackHook(after_eval_step=lambda trainer, phase, index, inputs, outputs: draw_noise(None, None))
    assert outputs_beside(careless) != undisturbed


def test_a_config_switches_it_on_for_validation_and_test(tmp_path):
    entry = {"NAME": "VisualizationHook", "DRAW": "draw_logits", "PERIOD": 3}
    DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", [entry], "DATASETS.VAL", ("tiny_val",))).train()

    found = files(tmp_path / "visualization")
    val = [f"val/tiny_val_iter{iteration}_batch0002.png" for iteration in ("0000004", "0000010")]
    assert found == ["test/tiny_test_iter0000010_batch0002.png", *val]
    image = decode_png((tmp_path / "visualization" / found[0]).read_bytes())
    assert image.shape == (2, 2, 3)  # 10 samples in batches of 4


def draw_on_a_rank(rank, folder):
    trainer = trainer_with(VisualizationHook(lambda inputs, outputs: gray(10 * rank), 1, Path(folder) / "drawn"))
    evaluate(trainer, [2, 1][rank])


@pytest.mark.slow
def test_each_rank_draws_batches_of_its_own_into_files_of_its_own(tmp_path):
    assert on_two_ranks([draw_on_a_rank], tmp_path)["draw_on_a_rank"] == [None, None]

    values = {name: decode_png((tmp_path / "drawn" / name).read_bytes())[0, 0, 0] for name in files(tmp_path / "drawn")}
    assert values == {
        "val/cats_iter0000007_batch0000.png": 0,
        "val/cats_iter0000007_batch0000_rank1.png": 10,
        "val/cats_iter0000007_batch0001.png": 0,
    }


NAMES = ["frankfurt/000.png", "a b", 7]


def test_each_image_is_called_as_its_sample(tmp_path):
    hook = VisualizationHook(lambda inputs, outputs: [gray(0), gray(1)], 1, tmp_path, names="file_name")
    batches = [{"file_name": NAMES}, [{"file_name": name} for name in NAMES]]
    with observe_inference(trainer_with(hook), "val"):
        inference_on_dataset(lambda inputs: inputs, batches, None, name="cats")
    names = [f"val/cats_iter0000007_batch000{batch}_{name}.png" for batch in (0, 1) for name in ("000", "a_b")]
    assert files(tmp_path) == names
