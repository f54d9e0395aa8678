"""``MODEL.COMPILE``: the model through torch.compile."""

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import scalars
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY

COMPILED = ["MODEL.COMPILE.ENABLED", True, "MODEL.COMPILE.BACKEND", "eager"]


@pytest.fixture(autouse=True)
def forget_compiled():
    """What is compiled in one test does not count among what is compiled of the same class in another."""
    torch.compiler.reset()


@MODEL_REGISTRY.register()
class Telling(nn.Module):
    """Logs whether it is being compiled."""

    def __init__(self, cfg):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, batch):
        logits = self.linear(batch["x"])
        if not self.training:
            return logits
        compiled = torch.full((), float(torch.compiler.is_compiling()))
        return {"loss_cls": nn.functional.cross_entropy(logits, batch["label"]), "compiled": compiled}


@MODEL_REGISTRY.register()
class OfTwoGraphs(Telling):
    def forward(self, batch):
        torch._dynamo.graph_break()
        return super().forward(batch)


def test_a_model_is_compiled_in_place(tmp_path):
    found = {}
    for options in ([], COMPILED):
        trainer = DefaultTrainer(
            tiny_cfg(tmp_path / str(len(options)), "MODEL.NAME", "Telling", "HOOKS", [{"NAME": "EMAHook"}], *options)
        )
        trainer.train()
        found[len(options)] = ({value for value, _ in scalars(trainer)["compiled"]}, list(trainer.model.state_dict()))
    assert found == {0: ({0.0}, ["linear.weight", "linear.bias"]), 4: ({1.0}, ["linear.weight", "linear.bias"])}


def test_a_compiled_run_is_resumed_without_compilation(tmp_path):
    DefaultTrainer(tiny_cfg(tmp_path, *COMPILED)).train(max_iter=5)
    resumed = DefaultTrainer(tiny_cfg(tmp_path))
    resumed.resume_or_load()
    resumed.train()
    assert (resumed.status, resumed.start_iter, resumed.iter) == ("finished", 5, 10)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], None),
        (["MODEL.COMPILE.DYNAMIC", True], None),
        (["MODEL.COMPILE.DYNAMIC", None], "MODEL.COMPILE.DYNAMIC None"),
        (["MODEL.COMPILE.MODE", "max-autotune", "MODEL.COMPILE.BACKEND", "inductor"], "MODEL.COMPILE.MODE"),
    ],
)
def test_settings_under_which_a_resumed_run_may_differ_are_named(tmp_path, caplog, options, named):
    DefaultTrainer(tiny_cfg(tmp_path, *COMPILED, *options))
    assert [named in text for text in caplog.messages if "may differ" in text] == ([] if named is None else [True])
