"""A job in which ``MODEL.PLANT`` plants mistakes."""

import random
import signal
from collections import deque
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
MANY = 400_000


def make_samples(seed, plant=""):
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(SAMPLES) % CLASSES
    centers = torch.randn(CLASSES, 16, generator=torch.Generator().manual_seed(0))
    image = 0.7 * centers[label] + 0.5 * torch.randn(SAMPLES, 16, generator=generator)
    image = (image / 2 - 5 * (plant == "normalized twice")).reshape(SAMPLES, 1, 4, 4)
    if "colors" in plant:
        image = (
            image.reshape(SAMPLES, 4, 2, 2) + torch.tensor([0.3, 0.1, -0.1, -0.3])[:, None, None]
        )
    if plant == "no labels" and seed == 1:
        return [{"image": each, "index": i} for i, each in enumerate(image)]
    if plant == "shuffled labels":
        label = label[torch.randperm(SAMPLES, generator=generator)]
    if seed == 2:
        image, label = disturbed(image, label, plant)
    samples = [{"image": a, "label": int(b)} for a, b in zip(image, label, strict=True)]
    if "no class 3" in plant and seed == 2:
        return [sample for sample in samples if sample["label"] < 3]
    if "paths" in plant:
        samples = [{**each, "path": f"{seed}/{i}.png"} for i, each in enumerate(samples)]
    return Augmented(samples, plant) if "augmentation" in plant and seed == 1 else samples


def disturbed(image, label, plant):
    """The validation data with a mistake that TRAIN does not have."""
    match plant:
        case "shuffled labels in VAL":
            label = label[torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(5))]
        case "shifted labels in VAL":
            label = (label + 1) % CLASSES
        case "two classes swapped in VAL":
            label = torch.tensor([0, 2, 1, 3])[label]
        case "a third of the labels shuffled in VAL":
            label = torch.where(torch.arange(SAMPLES) % 2 == 0, label, (label + 1) % CLASSES)
        case "other normalization in VAL":
            image = 3 * image + 1
        case "not divided by 255 in VAL":
            image = (100 * image.clamp(0)).to(torch.uint8)
        case "colors, in another order in VAL":
            image = image.flip(1)
        case "colors, turned by one in VAL":
            image = image.roll(1, 1)
        case "sorted by class in VAL":
            order = label.argsort()
            image, label = image[order], label[order]
    return image, label


class Many:
    """Many samples, their labels in turn; ``first`` is the number of the first one."""

    def __init__(self, length, first=0):
        self.label = torch.arange(first, first + length) % CLASSES
        centers = torch.randn(CLASSES, 16, generator=torch.Generator().manual_seed(0))
        noise = torch.randn(first + length, 16, generator=torch.Generator().manual_seed(1))[first:]
        self.image = (0.35 * centers[self.label] + 0.25 * noise).reshape(length, 1, 4, 4)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        return {"image": self.image[index], "label": int(self.label[index])}


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
        width = self.body.out_features
        if self.plant == "batch norm of one sample":
            self.first, self.norm = nn.BatchNorm2d(1), nn.LayerNorm(width)
        if self.plant == "one layer three times":
            self.more = nn.ModuleList([nn.Linear(width, width)] * 3)
        if self.plant in ("same memory", "tied, as declared"):
            self.more = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
            if self.plant == "same memory":
                self.more[1].weight = nn.Parameter(self.more[0].weight.data)
            else:
                self.more[1].weight = self.more[0].weight
                self._tied_weights_keys = ["more.1.weight"]
        self.kept = deque(maxlen=4 if self.plant == "short queue" else None)
        self.total = 0
        if "unused part" in self.plant:
            self.other = nn.Linear(4, 4)
        if "dead channels" in self.plant:
            self.norm.bias.data[:20] = -100

    def forward(self, batch):
        image = batch["image"].float()
        if self.plant == "batch norm of one sample":
            image = self.first(image)
        features = F.relu(self.norm(self.body(image.flatten(1))))
        for layer in getattr(self, "more", ()):
            features = features + 0.1 * layer(features)
        if self.plant == "dropout stays on":
            features = F.dropout(features, 0.2)
        if self.training and self.plant in ("kept features", "short queue"):
            self.kept.append(features.detach())
        features = features * (features.mean().item() > -1 if self.plant == "item" else 1)
        logits = self.head(features) * (50 if "large outputs" in self.plant else 1)
        if not self.training:
            return logits
        if self.plant == "no labels":
            return {"loss": F.mse_loss(logits, batch["image"].flatten(1)[:, :CLASSES])}
        if self.plant == "softmax":
            return {"loss": F.cross_entropy(logits.softmax(1), batch["label"])}
        if self.plant == "sigmoid":
            return {"loss": F.cross_entropy(logits.sigmoid(), batch["label"])}
        if self.plant == "no logarithm":
            return {"loss": F.nll_loss(logits.softmax(1), batch["label"])}
        if self.plant == "probabilities with logits":
            truth = F.one_hot(batch["label"], CLASSES).float()
            return {"loss": F.binary_cross_entropy_with_logits(logits.softmax(1), truth)}
        if self.plant == "log softmax":
            return {"loss": F.nll_loss(logits.log_softmax(1), batch["label"])}
        loss = F.cross_entropy(
            logits, batch["label"], reduction="sum" if self.plant == "sum" else "mean"
        )
        if self.plant == "kept graph":
            self.total = self.total + loss
        if self.plant == "kept losses":
            self.kept.append(loss)
        return {"loss": loss.detach() if self.plant == "detached" else loss}


class Hook(HookBase):
    def before_train(self):
        if self.trainer.cfg.MODEL.PLANT == "eval mode":
            self.trainer.model.norm.eval()

    def after_backward(self):
        if self.trainer.cfg.MODEL.PLANT == "random hook":
            self.trainer.model.head.bias.grad += random.SystemRandom().random()


class Trainer(DefaultTrainer):
    @classmethod
    def test(cls, cfg, model, evaluators=None):
        plant = cfg.MODEL.PLANT
        if plant == "evaluation fails":
            raise RuntimeError("no such metric")
        if plant == "evaluation of its own":
            return {"classification": {"top1": 50.0}}
        results = super().test(cfg, model, evaluators)
        if plant == "evaluation changes weights":
            model.head.weight.data.mul_(0.99)
        if plant == "evaluation changes statistics":
            model.norm.running_mean += 0.01
        if plant == "evaluation changes modes":
            model.eval()
        if plant == "evaluation freezes":
            model.body.requires_grad_(False)
        if plant == "evaluation draws":
            results["classification"]["top1"] += float(torch.rand(()))
        return results

    @classmethod
    def build_test_loader(cls, cfg, dataset_name):
        if cfg.MODEL.PLANT == "evaluation of its own":
            raise NotImplementedError("test() has its own data")
        return super().build_test_loader(cfg, dataset_name)

    @classmethod
    def build_lr_scheduler(cls, cfg, optimizer):
        match cfg.MODEL.PLANT:
            case "steps of epochs":
                return torch.optim.lr_scheduler.StepLR(optimizer, 1000)
            case "short cycle":
                return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
            case "cosine of torch":
                return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.SOLVER.MAX_ITER)
        return super().build_lr_scheduler(cfg, optimizer)

    def build_hooks(self):
        return [*super().build_hooks(), Hook()]

    @classmethod
    def build_optimizer(cls, cfg, model):
        if "SIG" in cfg.MODEL.PLANT and cfg.OUTPUT_DIR.endswith("/1"):  # while it is checked
            signal.raise_signal(signal.Signals[cfg.MODEL.PLANT])
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
        if plant == "last batch of one":
            return DataLoader(dataset[:225], 7, shuffle=True, generator=generator)
        without_state = DataLoader(dataset, 32, shuffle=True, generator=generator, drop_last=True)
        return without_state if plant == "loader without state" else loader

    def resume_or_load(self, resume=True):
        super().resume_or_load(resume=resume and self.cfg.MODEL.PLANT != "never resumed")


class OwnStep(Trainer):
    def run_step(self):
        loss = self.model(self.fetch())["loss"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.storage.put_scalar("loss_own", loss.detach())


def make_train(plant):
    if "many" in plant:
        return Many(MANY)
    return Many(3_000) if plant == "labels in turn" else make_samples(1, plant)


def make_test(plant):
    match plant:
        case "many, leak":
            return Many(2_000)
        case "many":
            return Many(2_000, MANY)
        case "labels in turn":
            return Many(SAMPLES, 3_000)
        case "no labels":
            return make_samples(2, plant) + make_samples(1)[:100]
        case "overlap, random augmentation" | "overlap":
            return make_samples(1)
        case "overlap, with paths":
            return [{**each, "path": f"2/{i}.png"} for i, each in enumerate(make_samples(1))]
    return make_samples(2, plant)


def main(args):
    plant = args.opts[args.opts.index("MODEL.PLANT") + 1] if "MODEL.PLANT" in args.opts else ""
    DatasetCatalog.register("planted_train", lambda: make_train(plant))
    DatasetCatalog.register("planted_test", lambda: make_test(plant))
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
