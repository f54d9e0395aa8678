"""What docs/performance.md shows does what it says."""

import pytest
import torch

from tests.docs.pages import blocks, run
from tests.engine.tiny import Weight, sgd
from trainkit.config import CfgNode, get_cfg
from trainkit.engine import GraphTrainer, HookBase, SimpleTrainer

GARBAGE, EAGER, GRAPH = blocks("docs/performance.md", "yaml")
STORE_NORM, TRAINERS = blocks("docs/performance.md", "python")


def test_every_yaml_block_is_a_config_and_the_hook_stores_what_each_iteration_had():
    for text in (GARBAGE, EAGER, GRAPH):
        get_cfg().merge_from_other_cfg(CfgNode(CfgNode._load_cfg_from_yaml_str(text)))
    names, model = run(STORE_NORM, "performance.md", HookBase=HookBase), Weight()
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model, lr=0.25), async_write_metrics=True)
    trainer.register_hooks([names["StoreNorm"]()])
    trainer.train(0, 3)
    assert trainer.storage.history("norm").values() == [(0.75, 0), (0.5, 1), (0.25, 2)]


@pytest.mark.slow
def test_both_trainers_of_the_script_train_the_same():
    losses = []
    for line in TRAINERS.splitlines():
        torch.manual_seed(0)
        names = {"SimpleTrainer": SimpleTrainer, "GraphTrainer": GraphTrainer, "torch": torch}
        trainer = run(line, "performance.md", model=Weight(), loader=[torch.tensor(1.0)], **names)["trainer"]
        trainer.train(0, 3)
        losses.append(trainer.storage.history("total_loss").values())
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]
