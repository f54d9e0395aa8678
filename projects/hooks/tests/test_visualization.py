import logging
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


# ---------------------------------------------------------------------- which batches, which files


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


def test_several_images_of_a_batch_are_numbered_and_none_is_fine(tmp_path):
    evaluate(trainer_with(VisualizationHook(lambda inputs, outputs: [gray(i) for i in range(inputs)], 1, tmp_path)), 3)

    assert files(tmp_path) == [
        "val/cats_iter0000007_batch0001.png",
        "val/cats_iter0000007_batch0002_0.png",
        "val/cats_iter0000007_batch0002_1.png",
    ]
    last = tmp_path / "val" / "cats_iter0000007_batch0002_1.png"
    assert np.array_equal(decode_png(last.read_bytes()), gray(1))


def test_a_second_evaluation_of_the_same_data_in_an_iteration_leaves_the_pictures_of_the_first(tmp_path):
    trainer = trainer_with(VisualizationHook(lambda inputs, outputs: gray(outputs), 1, tmp_path))

    evaluate(trainer, 1, model=lambda inputs: 10)
    evaluate(trainer, 1, "test", model=lambda inputs: 20)
    evaluate(trainer, 1, model=lambda inputs: 30)
    trainer.iter = 8
    evaluate(trainer, 1, model=lambda inputs: 40)

    values = {name: decode_png((tmp_path / name).read_bytes())[0, 0, 0] for name in files(tmp_path)}
    assert values == {
        "test/cats_iter0000007_batch0000.png": 20,
        "val/cats_2_iter0000007_batch0000.png": 30,
        "val/cats_iter0000007_batch0000.png": 10,
        "val/cats_iter0000008_batch0000.png": 40,
    }
    trainer.hooks[0].before_train()  # of another run over the same iterations
    evaluate(trainer, 1, model=lambda inputs: 50)
    assert files(tmp_path) == [*values]
    assert decode_png((tmp_path / "val/cats_iter0000008_batch0000.png").read_bytes())[0, 0, 0] == 50


IMAGE = np.random.default_rng(1).integers(0, 256, (2, 4, 3), np.uint8)


@pytest.mark.parametrize(
    "image",
    [IMAGE, IMAGE[:, ::-1, ::-1], torch.from_numpy(IMAGE).permute(1, 0, 2)],
    ids=["array", "view", "tensor"],
)
def test_arrays_views_and_tensors_are_written_as_they_look(tmp_path, image):
    evaluate(trainer_with(VisualizationHook(lambda inputs, outputs: image, 1, tmp_path)), 1)

    [path] = tmp_path.rglob("*.png")
    assert np.array_equal(decode_png(path.read_bytes()), np.asarray(image))


# ---------------------------------------------------------------------- the storage


def test_the_open_storage_gets_the_images_too(tmp_path):
    buffer = gray(0)

    def draw(inputs, outputs):
        buffer[:] = inputs  # the array of the batch before
        return [buffer, buffer + 1] if inputs == 3 else buffer

    trainer = trainer_with(VisualizationHook(draw, 2, tmp_path))
    with EventStorage(7) as storage:
        evaluate(trainer, 4)

    assert [(image.name, image.iter) for image in storage.images()] == [
        ("val/cats_batch0001", 7),
        ("val/cats_batch0003_0", 7),
        ("val/cats_batch0003_1", 7),
    ]
    for image, value in zip(storage.images(), (1, 3, 4), strict=True):
        assert torch.equal(image.tensor, torch.full((3, 2, 4), value, dtype=torch.uint8))


# ---------------------------------------------------------------------- what it leaves alone


def random_model(inputs):
    return torch.rand(1).item()


def outputs_beside(hook):
    """What a model that draws random numbers returns in an evaluation with this hook."""
    torch.manual_seed(1)
    seen = []
    spy = CallbackHook(after_eval_step=lambda trainer, phase, index, inputs, outputs: seen.append(outputs))
    evaluate(trainer_with(hook, spy), 4, model=random_model)
    return seen


def draw_noise(inputs, outputs):
    return (torch.rand(2, 4, 3) * 255).to(torch.uint8)


def test_random_numbers_of_the_drawing_change_no_output(tmp_path):
    undisturbed = outputs_beside(CallbackHook())

    assert outputs_beside(VisualizationHook(draw_noise, 1, tmp_path)) == undisturbed
    careless = CallbackHook(after_eval_step=lambda trainer, phase, index, inputs, outputs: draw_noise(None, None))
    assert outputs_beside(careless) != undisturbed


def test_a_file_that_cannot_be_written_is_an_error_in_the_log_and_the_evaluation_goes_on(tmp_path, caplog):
    (tmp_path / "val").write_text("this is no folder")
    seen = []
    spy = CallbackHook(after_eval=lambda trainer, phase, name, results: seen.append(name))

    evaluate(trainer_with(VisualizationHook(draw_number, 2, tmp_path), spy), 4)

    assert seen == ["cats"]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [
        f"Cannot write the picture '{tmp_path}/val/cats_iter0000007_batch{i:04d}.png': File exists" for i in (1, 3)
    ]


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "NoneType"),
        ("image.png", "str"),
        ([IMAGE, None], "NoneType"),
        (IMAGE / 255, r"shape \[2, 4, 3\], float64"),
        (torch.zeros(2, 4, 3, dtype=torch.bfloat16), r"shape \[2, 4, 3\], bfloat16"),
        (IMAGE.transpose(2, 0, 1), r"shape \[3, 2, 4\], uint8"),
        (IMAGE[..., 0], r"shape \[2, 4\], uint8"),
        (IMAGE[None], r"shape \[1, 2, 4, 3\], uint8"),
        (IMAGE[:0], r"shape \[0, 4, 3\], uint8"),
    ],
)
def test_what_is_no_rgb_image_is_refused_by_what_it_is(tmp_path, returned, got):
    message = rf"must return images of shape \[H, W, 3\], uint8, got {got}$"
    with pytest.raises(TypeError, match=message):
        evaluate(trainer_with(VisualizationHook(lambda inputs, outputs: returned, 1, tmp_path)))
    assert files(tmp_path) == []


def test_without_a_folder_to_write_to_neither_training_nor_an_evaluation_begins():
    steps = []

    class Trainer(TrainerBase):
        def run_step(self):
            steps.append(self.iter)

    trainer = Trainer()
    trainer.register_hooks([VisualizationHook(draw_number)])
    message = "VisualizationHook needs an output_dir"

    with pytest.raises(ValueError, match=message):
        trainer.train(0, 3)
    with pytest.raises(ValueError, match=message):
        evaluate(trainer, model=steps.append)
    assert steps == []


# ---------------------------------------------------------------------- from the config


def drawing_trainer(output_dir, **entry):
    entry = {"NAME": "VisualizationHook", "DRAW": "draw_logits", "PERIOD": 3, **entry}
    return DefaultTrainer(tiny_cfg(output_dir, "HOOKS", [entry], "DATASETS.VAL", ("tiny_val",)))


VAL = [f"val/tiny_val_iter{iteration}_batch0002.png" for iteration in ("0000004", "0000010")]
TEST = ["test/tiny_test_iter0000010_batch0002.png"]


def test_a_config_switches_it_on_and_off_for_validation_and_test(tmp_path):
    drawing_trainer(tmp_path / "on").train()
    drawing_trainer(tmp_path / "off", ENABLED=False).train()
    drawing_trainer(tmp_path / "elsewhere", OUTPUT_DIR=str(tmp_path / "pictures")).train()

    assert files(tmp_path / "on" / "visualization") == files(tmp_path / "pictures") == TEST + VAL
    assert not (tmp_path / "off" / "visualization").exists()
    assert not (tmp_path / "elsewhere" / "visualization").exists()
    image = decode_png((tmp_path / "on" / "visualization" / TEST[0]).read_bytes())
    assert image.shape == (2, 2, 3)  # 10 samples in batches of 4


# ---------------------------------------------------------------------- ranks


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


# ---------------------------------------------------------------------- phases, names, options


@pytest.mark.parametrize(
    ("phases", "drawn"), [("val", ["val"]), ("test", ["test"]), ("both", ["test", "val"])], ids=["val", "test", "both"]
)
def test_only_the_phases_that_are_asked_for_are_drawn(phases, drawn, tmp_path):
    trainer = trainer_with(VisualizationHook(draw_number, 1, tmp_path, phases=phases))
    evaluate(trainer, 1)
    evaluate(trainer, 1, "test")
    assert sorted(path.name for path in tmp_path.iterdir()) == drawn


NAMES = ["frankfurt/000.png", "a b", 7]


@pytest.mark.parametrize(
    "batch", [{"file_name": NAMES}, [{"file_name": name} for name in NAMES]], ids=["of the batch", "of its samples"]
)
def test_each_image_is_called_as_its_sample(batch, tmp_path):
    hook = VisualizationHook(lambda inputs, outputs: [gray(0), gray(1)], 1, tmp_path, names="file_name")
    trainer = trainer_with(hook)
    with EventStorage() as storage, observe_inference(trainer, "val"):
        inference_on_dataset(lambda inputs: inputs, [batch], None, name="cats")
    assert files(tmp_path) == [
        "val/cats_iter0000007_batch0000_000.png",
        "val/cats_iter0000007_batch0000_a_b.png",
    ]
    assert [image.name for image in storage.images()] == ["val/cats_batch0000_000", "val/cats_batch0000_a_b"]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"name": ["a"]}, "names of VisualizationHook is 'file_name', which is no key of the batch"),
        ({"file_name": ["a"]}, "2 images are drawn of a batch with 1 names"),
    ],
)
def test_names_that_do_not_fit_are_an_error(batch, message, tmp_path):
    hook = VisualizationHook(lambda inputs, outputs: [gray(0), gray(1)], 1, tmp_path, names="file_name")
    with observe_inference(trainer_with(hook), "val"), pytest.raises(ValueError, match=message):
        inference_on_dataset(lambda inputs: inputs, [batch], None, name="cats")
