"""A job in which ``MODEL.PLANT`` plants mistakes."""

import random
import signal
from itertools import islice

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from trainkit.config import get_cfg
from trainkit.data import DatasetCatalog, ToIterableDataset  # noqa: F401
from trainkit.engine import DefaultTrainer, HookBase, default_argument_parser, launch, run
from trainkit.modeling import MODEL_REGISTRY

CLASSES, SAMPLES = 4, 240


def make_samples(seed, plant=""):
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(SAMPLES) % CLASSES
    centers = torch.randn(CLASSES, 16, generator=torch.Generator().manual_seed(0))
    image = 0.7 * centers[label] + 0.5 * torch.randn(SAMPLES, 16, generator=generator)
    image = (image / 2 - 5 * (plant == "normalized twice")).reshape(SAMPLES, 1, 4, 4)
    if plant == "no labels" and seed == 1:
        return [{"image": each, "index": i} for i, each in enumerate(image)]
    if plant == "shuffled labels":
        label = label[torch.randperm(SAMPLES, generator=generator)]
    samples = [{"image": a, "label": int(b)} for a, b in zip(image, label, strict=True)]
    if "no class 3" in plant and seed == 2:
        return [sample for sample in samples if sample["label"] < 3]
    return Augmented(samples, plant) if "augmentation" in plant and seed == 1 else samples


class Augmented:
    def __init__(self, samples, plant):
        self.samples, self.plant = samples, plant

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        noise = random.SystemRandom() if "unseeded" in self.plant else random
        changed = {**sample, "image": sample["image"] + 0.01 * noise.random()}
        return sample if "idle" in self.plant else changed


@MODEL_REGISTRY.register()
class Planted(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.plant = cfg.MODEL.PLANT
        self.body = nn.Linear(16, cfg.MODEL.get("HIDDEN", 32))
        self.norm, self.head = (
            nn.BatchNorm1d(self.body.out_features),
            nn.Linear(self.body.out_features, CLASSES),
        )
        self.body.requires_grad_(self.plant != "frozen")
        if "unused part" in self.plant:
            self.other = nn.Linear(4, 4)
        if "dead channels" in self.plant:
            self.norm.bias.data[:20] = -100

    def forward(self, batch):
        features = F.relu(self.norm(self.body(batch["image"].flatten(1))))
        features = features * (features.mean().item() > -1 if self.plant == "item" else 1)
        logits = self.head(features) * (50 if "large outputs" in self.plant else 1)
        if not self.training:
            return logits
        if self.plant == "no labels":
            return {"loss": F.mse_loss(logits, batch["image"].flatten(1)[:, :CLASSES])}
        loss = F.cross_entropy(
            logits, batch["label"], reduction="sum" if self.plant == "sum" else "mean"
        )
        return {"loss": loss.detach() if self.plant == "detached" else loss}


class Hook(HookBase):
    def before_train(self):
        if self.trainer.cfg.MODEL.PLANT == "eval mode":
            self.trainer.model.norm.eval()

    def after_backward(self):
        if self.trainer.cfg.MODEL.PLANT == "random hook":
            self.trainer.model.head.bias.grad += random.SystemRandom().random()


class Trainer(DefaultTrainer):
    def build_hooks(self):
        return [*super().build_hooks(), Hook()]

    @classmethod
    def build_optimizer(cls, cfg, model):
        if cfg.MODEL.PLANT == "interrupt" and cfg.OUTPUT_DIR.endswith("/1"):  # while it is checked
            signal.raise_signal(signal.SIGINT)
        optimizer = super().build_optimizer(cfg, model)
        if cfg.MODEL.PLANT == "early optimizer":
            model.head = nn.Linear(model.body.out_features, CLASSES)
        return optimizer

    @classmethod
    def build_train_loader(cls, cfg):
        plant, loader = cfg.MODEL.PLANT, super().build_train_loader(cfg)
        if "repeated batches" in plant:
            return [batch for batch in islice(loader, 20) for _ in range(2)]
        dataset, generator = DatasetCatalog.get("planted_train"), torch.Generator().manual_seed(1)
        without_state = DataLoader(dataset, 32, shuffle=True, generator=generator, drop_last=True)
        return without_state if plant == "loader without state" else loader

    def resume_or_load(self, resume=True):
        super().resume_or_load(resume=resume and self.cfg.MODEL.PLANT != "never resumed")


class OwnStep(Trainer):
    def run_step(self):
        loss = self.model(next(self._trainer._data_loader_iter))["loss"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.storage.put_scalar("loss_own", loss.detach())


def main(args):
    plant = args.opts[args.opts.index("MODEL.PLANT") + 1] if "MODEL.PLANT" in args.opts else ""
    DatasetCatalog.register("planted_train", lambda: make_samples(1, plant))
    DatasetCatalog.register(
        "planted_test",
        lambda: (
            make_samples(1 if plant == "overlap" else 2, plant)
            + make_samples(1)[: 100 * (plant == "no labels")]
        ),
    )
    cfg = get_cfg()
    cfg.merge_from_list(
        ["MODEL.NAME", "Planted", "MODEL.PLANT", "", "MODEL.DEVICE", "cpu", "SEED", 0]
    )
    cfg.merge_from_list(["DATASETS.TRAIN", ["planted_train"], "DATASETS.TEST", ["planted_test"]])
    cfg.merge_from_list(
        ["TEST.EVALUATORS", ["ClassificationEvaluator"], "DATALOADER.NUM_WORKERS", 0]
    )
    cfg.merge_from_list(["SOLVER.IMS_PER_BATCH", 32, "SOLVER.MAX_ITER", 100, "SOLVER.BASE_LR", 0.1])
    run(args, OwnStep if plant == "own step" else Trainer, cfg)


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    launch(main, args.num_gpus, args=(args,))
