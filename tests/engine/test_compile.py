"""The model through torch.compile: by the trainer with a graph where nothing is recorded, and by MODEL.COMPILE."""

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, batches, scalars, sgd
from trainkit.config import ConfigError, check_values
from trainkit.engine import DefaultTrainer, GraphTrainer, SimpleTrainer
from trainkit.engine.hooks import CallbackHook
from trainkit.modeling import MODEL_REGISTRY

COMPILED = ["MODEL.COMPILE.ENABLED", True, "MODEL.COMPILE.BACKEND", "eager"]


@pytest.fixture(autouse=True)
def forget_compiled():
    """What is compiled in one test does not count among what is compiled of the same class in another."""
    torch.compiler.reset()


@MODEL_REGISTRY.register()
class Telling(nn.Module):
    """Logs whether it is being compiled."""

    def __init__(self, cfg=None):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, batch):
        logits = self.linear(batch["x"])
        if not self.training:
            return logits if not torch.compiler.is_compiling() else logits * 0 + torch.tensor([0.0, 1.0])
        compiled = torch.full((), float(torch.compiler.is_compiling()))
        return {"loss_cls": nn.functional.cross_entropy(logits, batch["label"]), "compiled": compiled}


@MODEL_REGISTRY.register()
class OfTwoGraphs(Telling):
    def forward(self, batch):
        torch._dynamo.graph_break()
        return super().forward(batch)


class WithDropout(Regression):
    def forward(self, batch):
        x, y = batch
        return super().forward((nn.functional.dropout(x, 0.1), y))


class Traced(GraphTrainer):
    """What is compiled runs by the kernels of eager mode, which takes no time to compile."""

    def compile_model(self):
        return torch.compile(self.model, dynamic=False, backend="eager")


def losses(trainer):
    return [value for value, _ in scalars(trainer)["total_loss"]]


@pytest.mark.slow
def test_100_compiled_steps_follow_those_of_the_ordinary_trainer_through_a_change_of_shape():
    data = [*batches(4), *batches(1, size=2)]
    trainers = []
    for trainer_type in (SimpleTrainer, GraphTrainer):
        model = WithDropout()
        torch.manual_seed(0)
        trainers.append(trainer_type(model, data, sgd(model, lr=0.05)))
        trainers[-1].train(0, 100)
    ordinary, compiled = trainers

    assert losses(compiled) == pytest.approx(losses(ordinary), rel=1e-5, abs=1e-12)
    assert losses(compiled)[-1] < 0.5 * losses(compiled)[0]
    assert list(compiled.model.state_dict()) == list(ordinary.model.state_dict())


def test_only_training_is_compiled():
    model, batch = Telling(), {"x": torch.ones(3, 4), "label": torch.tensor([0, 1, 0])}
    found = {}
    for trainer_type in (SimpleTrainer, Traced):
        trainer = trainer_type(model, [batch], sgd(model, lr=0.0))
        trainer.train(0, 2)
        found[trainer_type] = [value for value, _ in scalars(trainer)["compiled"]]
        model.eval()
        assert torch.equal(trainer.model(batch), model.linear(batch["x"]))
        model.train()
    assert found == {SimpleTrainer: [0.0, 0.0], Traced: [1.0, 1.0]}


def test_another_model_is_compiled_anew():
    first, second = Regression(), Regression()
    trainer = Traced(first, batches(3), sgd(first))
    trainer.train(0, 2)
    trainer.model, trainer.optimizer = second, sgd(second)
    trainer.train(2, 4)
    assert not torch.equal(second.linear.weight, Regression().linear.weight)


def test_many_shapes_are_no_error():
    model = Regression()
    trainer = Traced(model, [batch for size in range(1, 13) for batch in batches(1, size)], sgd(model, lr=0.01))
    trainer.train(0, 24)
    assert len(losses(trainer)) == 24


def test_hooks_run_around_a_compiled_step_as_around_an_ordinary_one():
    calls = {SimpleTrainer: [], Traced: []}
    for trainer_type, found in calls.items():
        model = Regression()
        trainer = trainer_type(model, batches(3), sgd(model))
        points = ("before_step", "after_backward", "after_step")
        trainer.register_hooks(
            [
                CallbackHook(
                    **{point: lambda t, point=point, found=found: found.append((t.iter, point)) for point in points}
                )
            ]
        )
        trainer.train(0, 2)
    assert calls[Traced] == calls[SimpleTrainer]
    assert len(calls[Traced]) == 6


# ---------------------------------------------------------------------- MODEL.COMPILE


def test_a_compiled_model_of_a_config_is_compiled_in_place(tmp_path):
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
def test_what_a_resumed_run_does_not_get_back_of_it_is_named(tmp_path, options, named):
    inexact = DefaultTrainer(tiny_cfg(tmp_path, *COMPILED, *options)).describe_inexact()
    assert [named in text for text in inexact] == ([] if named is None else [True])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.COMPILE.MODE", "fast"], "MODEL.COMPILE.MODE: got 'fast' .*; accepted: 'default', 'reduce-overhead'"),
        (["MODEL.COMPILE.DYNAMIC", "auto"], "MODEL.COMPILE.DYNAMIC: got 'auto' .*; accepted: False, True, None"),
        (
            [*COMPILED, "SOLVER.GRAPH.ENABLED", True],
            "MODEL.COMPILE.ENABLED and SOLVER.GRAPH.ENABLED exclude each other",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        check_values(tiny_cfg(tmp_path, *options))


def test_a_backend_that_torch_does_not_know_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="torch refuses MODEL.COMPILE.*'gcc'"):
        DefaultTrainer(tiny_cfg(tmp_path, *COMPILED, "MODEL.COMPILE.BACKEND", "gcc"))


def test_a_model_that_is_not_one_graph_is_refused_with_the_line_only_where_it_has_to_be_one(tmp_path):
    options = [*COMPILED, "MODEL.NAME", "OfTwoGraphs"]
    whole = DefaultTrainer(tiny_cfg(tmp_path / "whole", *options, "MODEL.COMPILE.FULLGRAPH", True))
    with pytest.raises(ConfigError, match=r"not one graph: .*graph_break.*test_compile.py:\d+\); .*set FULLGRAPH to"):
        whole.train()
    parts = DefaultTrainer(tiny_cfg(tmp_path / "parts", *options))
    parts.train()
    assert (whole.status, parts.status) == ("failed", "finished")


@pytest.mark.parametrize("key", ["SOLVER.GRAPH.ENABLED", "MODEL.COMPILE.ENABLED"])
def test_a_missing_compiler_is_named_before_training(tmp_path, monkeypatch, key):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="'no-such-compiler', which is not installed; install it.*CXX"):
        DefaultTrainer(tiny_cfg(tmp_path, key, True))
    DefaultTrainer(tiny_cfg(tmp_path, *COMPILED))
