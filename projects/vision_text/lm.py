"""A causal language model of Hugging Face: by the config lm.yaml, and by a subclass."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from projects.vision_text.data import VOCABULARY, Texts
from projects.vision_text.job import start
from trainkit.config import CfgNode
from trainkit.data import MapDataset
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY, losses_from
from trainkit.solver import LAYER_DEPTH_REGISTRY

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@MODEL_REGISTRY.register()
def LlamaLM(cfg: CfgNode) -> nn.Module:
    """A causal language model of Hugging Face with MODEL.DEPTH layers, and with its own loss of ``labels``."""
    sizes = {**_SIZES, "num_hidden_layers": cfg.MODEL.DEPTH}
    return losses_from(
        LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes))
    )


@LAYER_DEPTH_REGISTRY.register()
def llama_depth(name: str) -> tuple[int, int]:
    """Depth of a parameter of a Llama with 2 blocks, and number of layers: embedding, blocks, last norm and head."""
    num_layers = 4
    block = re.match(r"model\.layers\.(\d+)\.", name)
    if block:
        return int(block[1]) + 1, num_layers
    if name.startswith("model.embed_tokens."):
        return 0, num_layers
    return 3, num_layers


@dataclass
class Tokens:
    """A batch class of your own, which moves itself to a device."""

    ids: torch.Tensor

    def to(self, device: torch.device) -> "Tokens":
        return Tokens(self.ids.to(device, non_blocking=True))


class Trainer(DefaultTrainer):
    """A batch is an object with ``to(device)``; ``split`` gets inputs and target from it."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, use_cache=False, **_SIZES)
        return losses_from(LlamaForCausalLM(config), next_token_loss, split=split_tokens)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        texts = MapDataset(Texts(480, seed=0), lambda sample: sample["input_ids"])
        return DataLoader(
            texts, 32, shuffle=True, collate_fn=lambda batch: Tokens(torch.stack(batch))
        )


def split_tokens(batch: Tokens) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The inputs of the model, and the tokens to predict."""
    return [batch.ids[:, :-1]], batch.ids[:, 1:]


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


if __name__ == "__main__":
    start(Trainer, [])
