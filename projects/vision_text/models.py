"""Models of other libraries by name: random weights from their configs, nothing is downloaded.

Each library is imported when its model is built, so that the others need not be installed.
"""

import re

from torch import nn
from torch.nn import functional as F

from projects.vision_text.data import CLASS_NAMES, LENGTH, SIZE, VOCABULARY
from trainkit.config import CfgNode
from trainkit.modeling import MODEL_REGISTRY, losses_from
from trainkit.solver import LAYER_DEPTH_REGISTRY

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}  # of a layer of Hugging Face


@MODEL_REGISTRY.register()
def Resnet18(cfg: CfgNode) -> nn.Module:
    """That of torchvision. A batch is a dict with ``image`` and ``label``, or a tuple of these two."""
    from torchvision.models import resnet18

    return losses_from(resnet18(num_classes=len(CLASS_NAMES)), F.cross_entropy)


@MODEL_REGISTRY.register()
def TimmViT(cfg: CfgNode) -> nn.Module:
    """A vision transformer of timm with MODEL.DEPTH blocks."""
    from timm.models import VisionTransformer

    options = {"patch_size": 8, "embed_dim": 64, "num_heads": 4, "depth": cfg.MODEL.DEPTH}
    return losses_from(VisionTransformer(SIZE, num_classes=len(CLASS_NAMES), **options), F.cross_entropy)


@MODEL_REGISTRY.register()
def BertClassifier(cfg: CfgNode) -> nn.Module:
    """An encoder of Hugging Face with MODEL.DEPTH layers. A batch has ``input_ids``, ``attention_mask``, ``label``."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": cfg.MODEL.DEPTH,
    }
    texts = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "num_labels": len(CLASS_NAMES)}
    return losses_from(BertForSequenceClassification(BertConfig(**sizes, **texts)), F.cross_entropy)


@MODEL_REGISTRY.register()
def LlamaLM(cfg: CfgNode) -> nn.Module:
    """A causal language model of Hugging Face with MODEL.DEPTH layers, and with its own loss of ``labels``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": cfg.MODEL.DEPTH,
    }
    return losses_from(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes)))


@LAYER_DEPTH_REGISTRY.register()
def resnet_depth(name: str) -> tuple[int, int]:
    """The first convolution and its norm are layer 0, ``layer1`` to ``layer4`` are 1 to 4, ``fc`` is 5, of 6 layers."""
    stage = re.match(r"layer(\d)\.", name)
    return (int(stage[1]) if stage else 5 if name.startswith("fc.") else 0), 6


@LAYER_DEPTH_REGISTRY.register()
def llama_depth(name: str) -> tuple[int, int]:
    """The embedding is layer 0, then the blocks, then the last norm and the head; for a model of 2 blocks."""
    block = re.match(r"model\.layers\.(\d+)\.", name)
    return (int(block[1]) + 1 if block else 0 if name.startswith("model.embed_tokens.") else 3), 4
