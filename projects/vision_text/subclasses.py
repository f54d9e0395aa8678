"""The four models by subclasses of ``DefaultTrainer``: nothing is registered, and each has another kind of batch.

::

    python -m projects.vision_text.subclasses --job resnet18
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from projects.vision_text.data import CLASS_NAMES, SIZE, VOCABULARY, Shapes, Texts, ToImage
from trainkit.config import CfgNode, get_cfg
from trainkit.data import MapDataset
from trainkit.engine import DefaultTrainer, default_argument_parser, launch, run
from trainkit.modeling import losses_from


class ResnetTrainer(DefaultTrainer):
    """A batch is a list [images, labels], as a plain ``DataLoader`` makes it of samples that are tuples."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        from torchvision.models import resnet18

        return losses_from(resnet18(num_classes=len(CLASS_NAMES)), F.cross_entropy)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode, seed: int = 0) -> Any:
        pairs = MapDataset(Shapes(480, seed), lambda sample: (ToImage()(sample)["image"], sample["label"]))
        return DataLoader(pairs, cfg.SOLVER.IMS_PER_BATCH, shuffle=not seed)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        return cls.build_train_loader(cfg, seed=1)


class ViTTrainer(DefaultTrainer):
    """A batch is a dict of ``image`` and ``label``, from the registered data sets."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        from timm.models import VisionTransformer

        model = VisionTransformer(SIZE, 8, num_classes=len(CLASS_NAMES), embed_dim=64, num_heads=4, depth=2)
        return losses_from(model, F.cross_entropy)


class EncoderTrainer(DefaultTrainer):
    """A batch is a ``BatchEncoding``, as a tokenizer or a collator of Hugging Face makes it."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
        config = BertConfig(vocab_size=VOCABULARY, num_labels=3, **sizes)
        return losses_from(BertForSequenceClassification(config), F.cross_entropy)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode, seed: int = 0) -> Any:
        from transformers import BatchEncoding

        data = Texts(480, seed)
        return DataLoader(data, 32, shuffle=not seed, collate_fn=lambda texts: BatchEncoding(default_collate(texts)))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        return cls.build_train_loader(cfg, seed=1)


@dataclass
class Tokens:
    """A batch class of one's own, which says itself how it is moved."""

    ids: torch.Tensor

    def to(self, device: torch.device) -> "Tokens":
        return Tokens(self.ids.to(device, non_blocking=True))


class LMTrainer(DefaultTrainer):
    """A batch is an object with ``to(device)``; ``split`` takes inputs and target out of it."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes))
        return losses_from(model, next_token_loss, split=lambda batch: ([batch.ids[:, :-1]], batch.ids[:, 1:]))

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        texts = MapDataset(Texts(480, seed=0), lambda sample: sample["input_ids"])
        return DataLoader(texts, 32, shuffle=True, collate_fn=lambda batch: Tokens(torch.stack(batch)))


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


_IMAGES = ["IMPORTS", ["projects.vision_text"], "INPUT.TRAIN_TRANSFORM", "ToImage", "INPUT.TEST_TRANSFORM", "ToImage"]
_IMAGES += ["DATASETS.TRAIN", ["shapes_train"], "DATASETS.TEST", ["shapes_test"]]
JOBS: dict[str, tuple[type[DefaultTrainer], list[Any]]] = {
    "resnet18": (ResnetTrainer, [*_IMAGES, "SOLVER.MAX_ITER", 30, "SOLVER.WARMUP_ITERS", 3]),
    "vit": (ViTTrainer, _IMAGES),
    "encoder": (EncoderTrainer, ["DATASETS.TEST", ["texts_test"]]),
    "lm": (LMTrainer, []),
}


def main(args: argparse.Namespace) -> dict[str, Any]:
    """One process of the run; returns the results of the last evaluation on rank 0."""
    trainer_class, options = JOBS[args.job]
    cfg = get_cfg()
    cfg.merge_from_file(Path(__file__).with_name("base.yaml"))
    cfg.merge_from_list(["OUTPUT_DIR", f"./output/{args.job}_subclass", *options])
    return run(args, trainer_class, cfg)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = default_argument_parser()
    parser.add_argument("--job", choices=JOBS, required=True, help="which model")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse_args()
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
