"""A job of a fraction of a second for the tests of what is assembled from a config."""

from pathlib import Path

import torch
from torch import nn

from trainkit.config import CfgNode, get_cfg
from trainkit.data import TRANSFORM_REGISTRY, DatasetCatalog
from trainkit.evaluation import EVALUATOR_REGISTRY, DatasetEvaluator
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils import comm


@MODEL_REGISTRY.register()
class TinyClassifier(nn.Module):
    """Two classes of 4 numbers; batch norm and dropout, so that modes and random state matter."""

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
        )

    def forward(self, batch):
        logits = self.layers(batch["x"])
        if not self.training:
            return logits
        return {"loss_cls": nn.functional.cross_entropy(logits, batch["label"])}


@MODEL_REGISTRY.register()
class NeedsMemory(TinyClassifier):
    """For 23 samples there is enough memory."""

    def forward(self, batch):
        if len(batch["label"]) > 23:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(batch)


@EVALUATOR_REGISTRY.register()
class TinyAccuracy(DatasetEvaluator):
    """The results of a ClassificationEvaluator, which is in a project."""

    def __init__(self, cfg: CfgNode, dataset_name: str) -> None:
        self.reset()

    def reset(self):
        self.pairs = []

    def process(self, inputs, outputs):
        self.pairs += zip(inputs["label"].tolist(), outputs.argmax(dim=1).tolist(), strict=True)

    def evaluate(self):
        pairs = [pair for part in comm.all_gather(self.pairs) for pair in part]
        hits = {
            label: [found == label for own, found in pairs if own == label]
            for label in {own for own, _ in pairs}
        }
        by_class = [100.0 * sum(of_class) / len(of_class) for of_class in hits.values()]
        top1 = 100.0 * sum(map(sum, hits.values())) / len(pairs)
        return {
            "classification": {"top1": top1, "mean_class_accuracy": sum(by_class) / len(by_class)}
        }


@TRANSFORM_REGISTRY.register()
def HalveX(cfg: CfgNode):
    return lambda sample: {**sample, "x": sample["x"] / 2}


def _samples(num, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, 4, generator=generator, device="cpu")
    return [{"x": x, "label": int(x.sum() > 0)} for x in inputs]


DatasetCatalog.register("tiny_train", lambda: _samples(40, 0))
DatasetCatalog.register("tiny_val", lambda: _samples(12, 1))
DatasetCatalog.register("tiny_test", lambda: _samples(10, 2))


def tiny_cfg(output_dir: Path, *options: object) -> CfgNode:
    """10 iterations of 8 samples (5 per epoch), evaluated and saved every 5, on the CPU."""
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *(
                "OUTPUT_DIR",
                str(output_dir),
                "SEED",
                1,
                "MODEL.NAME",
                "TinyClassifier",
                "MODEL.DEVICE",
                "cpu",
            ),
            *(
                "DATASETS.TRAIN",
                ("tiny_train",),
                "DATASETS.TEST",
                ("tiny_test",),
                "DATALOADER.NUM_WORKERS",
                0,
            ),
            *("INPUT.TRAIN_TRANSFORM", "HalveX", "INPUT.TEST_TRANSFORM", "HalveX"),
            *(
                "SOLVER.MAX_ITER",
                10,
                "SOLVER.IMS_PER_BATCH",
                8,
                "SOLVER.BASE_LR",
                0.1,
                "SOLVER.WARMUP_ITERS",
                2,
            ),
            *(
                "SOLVER.STEPS",
                (8,),
                "SOLVER.CHECKPOINT_PERIOD",
                5,
                "TEST.EVAL_PERIOD",
                5,
                "LOG.PERIOD",
                2,
            ),
            *(
                "TEST.EVALUATORS",
                ["TinyAccuracy"],
                "TEST.IMS_PER_BATCH",
                4,
                "LOG.WRITERS",
                ["json"],
            ),
            *options,
        ]
    )
    return cfg
