"""An encoder of Hugging Face: by the config encoder.yaml, and by a subclass."""

from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

from projects.vision_text.data import CLASS_NAMES, LENGTH, VOCABULARY, Texts
from projects.vision_text.job import start
from trainkit.config import CfgNode
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY, losses_from

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@MODEL_REGISTRY.register()
def BertClassifier(cfg: CfgNode) -> nn.Module:
    """An encoder of Hugging Face with MODEL.DEPTH layers. A batch has ``input_ids`` and ``label``."""
    sizes = {**_SIZES, "num_hidden_layers": cfg.MODEL.DEPTH}
    texts = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "num_labels": len(CLASS_NAMES),
    }
    return losses_from(BertForSequenceClassification(BertConfig(**sizes, **texts)), F.cross_entropy)


class Trainer(DefaultTrainer):
    """A batch is a ``BatchEncoding``, as a tokenizer or a collator of Hugging Face makes it."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        config = BertConfig(vocab_size=VOCABULARY, num_labels=3, num_hidden_layers=2, **_SIZES)
        return losses_from(BertForSequenceClassification(config), F.cross_entropy)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode, seed: int = 0) -> Any:
        data = Texts(480, seed)
        return DataLoader(
            data,
            32,
            shuffle=not seed,
            collate_fn=lambda texts: BatchEncoding(default_collate(texts)),
        )

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        return cls.build_train_loader(cfg, seed=1)


if __name__ == "__main__":
    start(Trainer, ["DATASETS.TEST", ["texts_test"]])
