from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from projects.segmentation import (
    CLASS_NAMES,
    FCN,
    PALETTE,
    DigitCanvases,
    UNet,
    ViTSegmenter,
    draw_segmentation,
)
from tests.utils.png import decode_png
from trainkit.config import get_cfg
from trainkit.data import DatasetCatalog, MetadataCatalog
from trainkit.engine import DefaultTrainer

FOLDER = Path(__file__).parents[2] / "projects" / "segmentation"

DatasetCatalog.register("few_canvases", lambda: DigitCanvases("val", 5))
MetadataCatalog.get("few_canvases").set(class_names=list(CLASS_NAMES))


def config(name, *options):
    cfg = get_cfg()
    cfg.merge_from_file(str(FOLDER / name))
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", *options])
    return cfg


def test_a_canvas_is_a_function_of_split_seed_and_index_alone():
    def same(left, right):
        return all(torch.equal(left[key], right[key]) for key in ("image", "label"))

    canvas = DigitCanvases("train", 10)[7]
    np.random.seed(1)
    torch.manual_seed(1)
    others = DigitCanvases("train", 10_000)
    _ = others[9_999]

    assert same(others[7], canvas)
    assert not same(others[8], canvas)
    assert not same(DigitCanvases("train", 10, seed=1)[7], canvas)
    assert not same(DigitCanvases("val", 10)[7], canvas)


NETWORKS = [UNet(width=2), FCN(width=2), ViTSegmenter(dim=8, depth=1, num_heads=2)]


@pytest.mark.parametrize("model", NETWORKS, ids=["UNet", "FCN", "ViT"])
def test_a_network_gives_losses_in_train_mode_and_logits_in_eval_mode(model):
    generator = torch.Generator().manual_seed(0)
    batch = {"image": torch.rand(2, 1, 48, 48, generator=generator)}
    batch["label"] = torch.randint(11, (2, 48, 48), generator=generator)
    losses = model.train()(batch)
    losses["loss_seg"].backward()
    assert [*losses] == ["loss_seg"]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []

    model.eval()
    logits = model({"image": batch["image"]})
    assert list(logits.shape) == [2, 11, 48, 48]
    expected = torch.nn.functional.cross_entropy(logits, batch["label"]).item()
    assert model.losses(batch)["loss_seg"].item() == pytest.approx(expected)


def test_image_truth_and_prediction_stand_side_by_side_in_the_colours_of_the_palette():
    # of which the fifth has no place
    image = torch.tensor([[[0.0, 1.0], [0.2, 1.7]]]).repeat(5, 1, 1, 1)
    label = torch.tensor([[0, 3], [1, 0]]).repeat(5, 1, 1)
    predicted = torch.tensor([[0, 3], [2, 10]]).repeat(5, 1, 1)
    logits = torch.nn.functional.one_hot(predicted, 11).permute(0, 3, 1, 2)

    drawn = draw_segmentation({"image": image, "label": label}, logits)

    assert list(drawn.shape) == [4 * 2 * 3, 3 * 2 * 3, 3]
    assert drawn.dtype == torch.uint8
    small = drawn[1::3, 1::3].tolist()
    white, black, colours = [255] * 3, [0] * 3, PALETTE.tolist()
    assert small[0] == [white, black, colours[0], colours[3], colours[0], colours[3]]
    assert small[1] == [[204] * 3, black, colours[1], colours[0], colours[2], colours[10]]
    assert torch.equal(drawn, drawn[1::3, 1::3].repeat_interleave(3, 0).repeat_interleave(3, 1))
    assert len(set(map(tuple, colours))) == len(CLASS_NAMES)


CONFIGS = ["config.yaml", "fcn.yaml", "vit.yaml"]
OPTIONS = [
    "DATASETS.TRAIN",
    ["few_canvases"],
    "DATASETS.VAL",
    ["few_canvases"],
    "DATASETS.TEST",
    ["few_canvases"],
]
OPTIONS += [
    "SOLVER.MAX_ITER",
    8,
    "SOLVER.IMS_PER_BATCH",
    2,
    "SOLVER.CHECKPOINT_PERIOD",
    3,
    "TEST.EVAL_PERIOD",
    4,
]
OPTIONS += [
    "SOLVER.SCHEDULES",
    [{"NAME": "Polynomial", "POWER": 0.9}],
    "TEST.IMS_PER_BATCH",
    2,
    "MODEL.WIDTH",
    2,
]
OPTIONS += ["LOG.PERIOD", 2, "LOG.WRITERS", ["json"]]


def short(name, folder, *options):
    vit = ["MODEL.VIT.DIM", 8, "MODEL.VIT.NUM_HEADS", 2] if name == "vit.yaml" else []
    return config(name, *OPTIONS, *vit, "OUTPUT_DIR", str(folder), *options)


def test_every_second_batch_of_an_evaluation_is_drawn_into_files_and_for_tensorboard(tmp_path):
    results = DefaultTrainer(short("fcn.yaml", tmp_path, "LOG.WRITERS", ["tensorboard"])).train()

    assert [*results["sem_seg"]][:4] == ["mIoU", "aAcc", "mAcc", "IoU-paper"]
    # five canvases in batches of two, the second of which is drawn
    evaluations = [
        "test/few_canvases_iter0000008",
        "val/few_canvases_iter0000003",
        "val/few_canvases_iter0000008",
    ]
    pictures = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.png")}
    assert sorted(pictures) == [
        f"visualization/{evaluation}_batch0001.png" for evaluation in evaluations
    ]
    shapes = {decode_png(path.read_bytes()).shape for path in pictures.values()}
    assert shapes == {(2 * 48 * 3, 3 * 48 * 3, 3)}
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    events.Reload()
    shown = {tag: [image.step for image in events.Images(tag)] for tag in events.Tags()["images"]}
    assert shown == {"val/few_canvases_batch0001": [3, 8], "test/few_canvases_batch0001": [8]}
