"""What docs/performance.md shows does what it says."""

import re
from pathlib import Path

import pytest
import torch

from tests.docs.keys import keys_named_in
from tests.engine.tiny import Weight, sgd
from trainkit.config import CfgNode, get_cfg
from trainkit.engine import GraphAMPTrainer, GraphTrainer, HookBase, SimpleTrainer, hooks
from trainkit.utils.events import get_event_storage

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_yaml_block_is_a_config():
    assert len(blocks("yaml")) == 3
    for text in blocks("yaml"):
        get_cfg().merge_from_other_cfg(CfgNode(CfgNode._load_cfg_from_yaml_str(text)))


def test_every_key_that_is_named_is_there():
    assert {"LOG.ASYNC", "SOLVER.NON_FINITE.POLICY", "CHECKPOINT.ASYNC"} <= keys_named_in(PAGE)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_hook_stores_what_each_iteration_had(asynchronous):
    namespace = {"HookBase": HookBase, "get_event_storage": get_event_storage}
    (source,) = [text for text in blocks("python") if text.startswith("class StoreNorm")]
    exec(source, namespace)

    model = Weight()
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model, lr=0.25), async_write_metrics=asynchronous)
    trainer.register_hooks([namespace["StoreNorm"]()])
    trainer.train(0, 3)
    assert trainer.storage.history("norm").values() == [(0.75, 0), (0.5, 1), (0.25, 2)]


def test_the_trainers_and_hooks_that_are_named_are_there():
    assert {"`GraphTrainer`", "`GraphAMPTrainer`", "`GarbageCollection`"} <= set(re.findall(r"`\w+`", PAGE))
    assert issubclass(GraphAMPTrainer, GraphTrainer)
    assert issubclass(hooks.GarbageCollection, HookBase)
