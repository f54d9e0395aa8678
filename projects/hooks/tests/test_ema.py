"""Averages of weights, against formulas, printed values and torch."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from trainkit.projects.hooks import averaging
from trainkit.projects.hooks.averaging import ModelAverage, averaging_rule
from trainkit.projects.hooks.publish_weights import publish_weights
from trainkit.projects.hooks.tests.test_family import Net

from tests.cuda import host_never_waits, needs_cuda
from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Weight, sgd
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer, file
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import BestCheckpointer, EMAHook, EvalHook, PreciseBN
from trainkit.engine.step import SimpleTrainer


class EveryTensor(nn.Module):
    """All kinds of tensors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.layers[1].num_batches_tracked = None  # torch averages integers too, or fails
        self.tied = self.layers[0].weight
        self.small = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.ones(2), persistent=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"decay": 0.9}, {0: 1, 1: 0.1, 9: 0.1}),
        ({"decay": 0.9, "interval": 2}, {0: 1, 1: 0, 2: 0.1}),
        (
            {"kind": "annealing", "decay": 0.9998},
            {1: 0.990099, 3: 0.970874, 499_900: 0.0002, 10_000_000: 0.0002},
        ),
        ({"kind": "annealing", "gamma": 1}, {3: 0.25}),
        ({"kind": "warmup", "decay": 0.9998}, {1: 0.9990007, 2000: 0.3678220, 10000: 0.0069332}),
        ({"kind": "warmup", "decay": 0.9998, "gamma": 1000}, {999: 0.3680059}),
        ({"kind": "mean"}, {1: 1 / 2, 2: 1 / 3}),
        (
            {"kind": "mmcv", "decay": 0.5, "gamma": 10},
            {1: 2 / 11, 2: 3 / 12, 3: 4 / 13, 8: 0.5, 9: 0.5},
        ),
        (
            {"kind": "mmcv", "decay": 0.5, "gamma": 10, "interval": 2},
            {1: 0, 2: 0.25, 3: 0, 8: 0.25},
        ),
        ({"kind": "mmcv", "decay": 0.9998}, {1: 0.0002, 100: 0.0002}),
    ],
)
def test_the_weight_of_an_update_is_that_of_its_rule(arguments, expected):
    rule = averaging_rule(**arguments)
    assert {steps: rule(steps) for steps in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("rule", "multi_avg_fn"),
    [
        (averaging_rule(decay=0.3), get_ema_multi_avg_fn(0.3)),
        (averaging_rule("mean"), get_swa_multi_avg_fn()),
    ],
    ids=["decay", "mean"],
)
@pytest.mark.parametrize("average_buffers", [False, True])
def test_parameters_and_averaged_buffers_are_torchs_to_the_last_bit(
    rule, multi_avg_fn, average_buffers
):
    model = EveryTensor()
    ours = ModelAverage(model, rule, average_buffers=average_buffers)
    theirs = AveragedModel(model, multi_avg_fn=multi_avg_fn, use_buffers=average_buffers)
    for _ in range(6):
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(torch.rand(tensor.shape))
        model.cache = torch.ones(7)
        ours.update()
        model.cache = torch.ones(2)
        theirs.update_parameters(model)

    found, expected = ours.state_dict(), theirs.module.state_dict()
    assert found.keys() == model.state_dict().keys()
    names = [name for name in found if average_buffers or "running" not in name]
    names.remove("small")  # bfloat16, which torch averages in bfloat16
    assert all(torch.equal(found[name], expected[name]) for name in names)
    assert not torch.equal(model.state_dict()["tied"], found["tied"])  # the comparison can fail


@pytest.mark.parametrize("average_buffers", [False, True])
def test_buffers_are_averaged_or_copied_and_a_replaced_one_is_followed(average_buffers):
    model = nn.BatchNorm1d(2)
    average = ModelAverage(
        model, averaging_rule(decay=0.5, interval=2), average_buffers=average_buffers
    )
    found = []
    for count in range(1, 5):
        model.running_mean = torch.full((2,), 2.0**count)
        model.num_batches_tracked.fill_(count)
        average.update()
        state = average.state_dict()
        found.append((state["running_mean"][0].item(), state["num_batches_tracked"].item()))
    assert found == (
        [(2, 1), (2, 2), (5, 3), (5, 4)] if average_buffers else [(2, 1), (4, 2), (8, 3), (16, 4)]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_averages_of_16_bit_weights_move_as_those_in_float64(dtype, buffers, tmp_path):
    """In 16 bits an update of a thousandth of the distance from 1 to 1.5 is rounded away."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).to(dtype)
    average = ModelAverage(model, averaging_rule(decay=0.999), average_buffers=buffers == "average")
    for step in range(200):
        with torch.no_grad():
            for tensor in [*model.parameters(), model[0].running_mean]:
                tensor.copy_(torch.full_like(tensor, 1.0 if step == 0 else 1.5))
        average.update()
    found = average.state_dict()
    names = [name for name, _ in model.named_parameters()]
    names += ["0.running_mean"] * (buffers == "average")
    for name in names:
        # 1.5 - 0.5 * 0.999**199
        expected = torch.full_like(found[name], 1.0902659, dtype=torch.float64)
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=0)
    assert found["0.running_var"].dtype == (torch.float32 if buffers == "average" else dtype)
    with average.held():
        assert model[1].weight.dtype == dtype
        assert torch.equal(model[1].weight, found["1.weight"].to(dtype))
    assert torch.equal(model[1].weight, torch.full((2, 3), 1.5, dtype=dtype))
    torch.save(found, tmp_path / "average.pth")
    resumed = ModelAverage(model, averaging_rule(), average_buffers=buffers == "average")
    resumed.load_state_dict(torch.load(tmp_path / "average.pth", weights_only=True))
    assert all(torch.equal(value, found[name]) for name, value in resumed.state_dict().items())


class HalfNet(Net):
    """In bfloat16."""

    def __init__(self):
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, batch):
        return super().forward(batch.bfloat16())


def test_a_best_file_of_16_bit_weights_holds_what_was_scored_in_the_models_precision(tmp_path):
    model, hook = HalfNet(), EMAHook(0.9)
    trainer = SimpleTrainer(model, [torch.randn(4, 3)], sgd(model))
    checkpointer = Checkpointer(model, tmp_path, trainer=trainer)
    scored = []

    def evaluate():
        scored.append(average_of(hook, model).state_dict())
        return {"top1": 1.0}

    evaluation = EvalHook(3, evaluate, eval_after_train=False)
    trainer.register_hooks([hook, evaluation, BestCheckpointer(3, checkpointer, "top1")])
    trainer.train(0, 3)
    state = file.read_file(tmp_path / "model_best.pth")
    for name, value in state["model"].items():
        assert value.dtype == model.state_dict()[name].dtype
        assert torch.equal(value, scored[0][name])
    assert averaging.averaged_weights(state)["layers.1.weight"].dtype == torch.float32
    published = torch.load(publish_weights(tmp_path / "model_best.pth", "ema"), weights_only=True)
    assert torch.equal(published["model"]["layers.1.weight"], scored[0]["layers.1.weight"])


@pytest.mark.parametrize(
    ("arguments", "iters", "percent"),
    [
        ({"decay": 0.999}, 94, 91),  # 0.999 ** 93
        ({"decay": 0.999}, 692, 50),  # 0.999 ** 691 = 0.5009
        ({"decay": 0.999}, 694, None),  # 0.999 ** 693 = 0.49991
        ({"decay": 0.999, "interval": 10}, 694, 93),  # 0.999 ** 69
        ({"decay": 0.5}, 2, None),
        ({"decay": 0.75, "begin": 8}, 10, 56),  # the updates after 8, 9 and 10 iterations
        ({"begin": 10}, 10, None),  # it is a copy of the last weights
        ({"kind": "annealing", "gamma": 1}, 10, None),
        ({"kind": "annealing"}, 500, None),
        ({"kind": "warmup", "decay": 0.9998}, 94, None),
        ({"kind": "mean"}, 94, None),
        ({"kind": "mmcv", "decay": 0.9998, "gamma": 100}, 94, 98),  # 0.9998 ** 93
    ],
)
def test_an_average_that_is_mostly_its_start_at_the_end_draws_a_warning(
    arguments, iters, percent, tmp_path, caplog
):
    job = Job(tmp_path, EMAHook(**arguments))
    job.trainer.max_iter = iters
    job.trainer.start_iter = 0
    job.hook.before_train()
    messages = [message for message in caplog.messages if "still" in message]
    if percent is None:
        assert messages == []
    else:
        [message] = messages
        assert f"are still {percent} % of it; take a smaller decay, such as 0." in message


@pytest.mark.parametrize("precise", [False, True])
def test_averaged_weights_beside_batch_norm_of_others_are_named_and_precise_statistics_are_theirs(
    precise, caplog
):
    caplog.set_level("INFO")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    wrapped = Loss(model)
    data = [torch.randn(8, 3) for _ in range(4)]
    hook, found = EMAHook(0.9), []
    trainer = SimpleTrainer(wrapped, data, sgd(wrapped, lr=0.05))

    def evaluate():
        with hook.evaluated_models(wrapped)[""] as evaluated:
            found.append(copy.deepcopy(evaluated.net))
        return {}

    statistics = [PreciseBN(5, wrapped, data, 4)] if precise else []
    trainer.register_hooks([hook, *statistics, EvalHook(5, evaluate)])
    trainer.train(0, 10)
    assert ("TEST.PRECISE_BN.ENABLED computes those of the average" in caplog.text) != precise
    for averaged in found:
        with torch.no_grad():
            inputs = averaged[0](torch.cat(data)).double()
        right = [
            (averaged[1].running_mean, inputs.mean(0)),
            (averaged[1].running_var, inputs.var(0)),
        ]
        assert precise == all(
            torch.allclose(ours.double(), theirs, rtol=1e-4, atol=1e-5) for ours, theirs in right
        )
    own = model[0](torch.cat(data)).double()
    assert precise == torch.allclose(model[1].running_var.double(), own.var(0), rtol=1e-4)


class Loss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, batch):
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()


@pytest.mark.parametrize(
    ("evaluate", "titles"),
    [
        ("both", ["tiny_test (ema)", "tiny_test (raw)"]),
        ("ema", ["tiny_test (ema)"]),
        ("raw", ["tiny_test"]),
    ],
)
def test_tables_of_results_say_which_weights_they_are_of(evaluate, titles, tmp_path, caplog):
    hook = {"NAME": "EMAHook", "EVALUATE": evaluate}
    caplog.set_level("INFO")
    DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", [hook], "TEST.EVAL_PERIOD", 0)).train()
    found = [message for message in caplog.messages if message.startswith("Results on")]
    assert found == [f"Results on {title}:" for title in titles]


@needs_cuda
def test_on_cuda_an_update_never_waits():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda()
    average = ModelAverage(model, averaging_rule())
    for _ in range(3):
        with host_never_waits():
            average.update()


def average_of(hook, model, prefix=""):
    with hook.evaluated_models(model)[prefix] as evaluated:
        return copy.deepcopy(evaluated)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"decay": 0.5, "begin": 1}, [0, -0.5, -1.25, -2.125, -3.0625]),
        ({"decay": 0.5, "begin": 3}, [0, -1, -2, -2.5, -3.25]),
        ({"kind": "mean", "begin": 3, "interval": 2}, [0, -1, -2, -2, -3]),
    ],
)
def test_the_average_follows_the_updates(arguments, expected):
    """Of a weight that is 0, -1, -2, ..., and that an evaluation does not change."""
    model, hook, found = Weight(), EMAHook(**arguments), []
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model, lr=1.0))
    note = AfterStep(lambda trainer: found.append(average_of(hook, model).weight))
    trainer.register_hooks([hook, note])
    trainer.train(0, 5)
    assert [weight.item() for weight in found] == pytest.approx(expected, abs=1e-6)
    assert model.weight.item() == -4


class Job:
    """A trainer with the hook and a checkpointer; every iteration sees the same batch."""

    def __init__(self, folder, hook=None, *others):
        self.model, self.hook = Net(), hook
        self.trainer = SimpleTrainer(self.model, [torch.randn(4, 3)], sgd(self.model, momentum=0.9))
        self.checkpointer = Checkpointer(self.model, folder, trainer=self.trainer)
        self.trainer.register_hooks([hook, *others])
        self.checkpointer.resume_or_load("")

    def train(self, start_iter, max_iter):
        self.trainer.train(start_iter, max_iter)
        return self

    @property
    def average(self):
        return average_of(self.hook, self.model)


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("begin", "warned"), [(3, True), (4, False)])
def test_a_checkpoint_without_an_average_begins_one_with_one_warning(
    begin, warned, tmp_path, caplog
):
    Job(tmp_path).train(0, 3).checkpointer.save("model")
    job = Job(tmp_path, EMAHook(0.5, begin=begin)).train(3, 8)
    assert caplog.text.count("EMAHook has no average of the first 3 iterations") == warned
    assert job.hook.state_dict()["steps"] == 5


def test_an_average_that_would_begin_after_the_end_is_an_error_before_training(tmp_path):
    Job(tmp_path, EMAHook(begin=2)).train(0, 2)
    with pytest.raises(ConfigError, match="begin of EMAHook is 3, .* only 2 iterations"):
        Job(tmp_path, EMAHook(begin=3)).train(0, 2)


def test_a_checkpoint_has_the_trained_weights_and_the_average_which_is_evaluated_without_training(
    tmp_path,
):
    job = Job(tmp_path, EMAHook(0.5)).train(0, 5)
    job.checkpointer.save("model")
    state = file.read_file(tmp_path / "model.pth")
    assert all(
        torch.equal(value, state["model"][name]) for name, value in job.model.state_dict().items()
    )
    found = averaging.averaged_weights(state)
    assert all(torch.equal(value, found[name]) for name, value in job.average.state_dict().items())
    assert not torch.equal(found["layers.1.weight"], state["model"]["layers.1.weight"])
    loaded = Job(tmp_path, EMAHook(0.5, evaluate="both"))
    assert loaded.hook.state_dict()["steps"] == 5
    assert equal(loaded.average, job.average)
    assert equal(average_of(loaded.hook, loaded.model, "raw"), job.model)


def test_without_training_and_without_an_average_the_models_own_weights_are_evaluated(
    tmp_path, caplog
):
    job = Job(tmp_path, EMAHook(evaluate="both"))
    assert equal(job.average, job.model)
    assert "EMAHook has no averaged weights" in caplog.text


@pytest.mark.parametrize(("buffers", "is_copied"), [("copy", True), ("average", False)])
def test_copied_buffers_are_those_that_later_hooks_have_left(buffers, is_copied, tmp_path):
    fill = AfterStep(lambda trainer: trainer.model.layers[0].running_mean.fill_(trainer.iter))
    job = Job(tmp_path, EMAHook(0.5, buffers=buffers), fill).train(0, 3)
    saved = job.hook.state_dict()["model"]["layers.0.running_mean"].clone()
    assert torch.equal(saved, job.average.layers[0].running_mean)
    assert torch.equal(saved, torch.full((3,), 2.0)) == is_copied


def test_the_model_has_its_own_weights_again_after_an_evaluation_and_is_not_saved_during_it(
    tmp_path,
):
    job = Job(tmp_path, EMAHook(0.5)).train(0, 3)
    before = copy.deepcopy(job.model)
    with job.hook.evaluated_models(job.model)[""] as evaluated:
        assert not equal(evaluated, before)
        with pytest.raises(RuntimeError, match="cannot be saved"):
            job.checkpointer.save("model")
    assert equal(job.model, before)


def test_a_best_file_by_a_metric_of_the_models_own_weights_holds_those(tmp_path):
    both = ["HOOKS", [{"NAME": "EMAHook", "EVALUATE": "both"}]]
    DefaultTrainer(
        tiny_cfg(tmp_path, "CHECKPOINT.BEST_METRIC", "raw/classification/top1", *both)
    ).train()
    assert file.read_file(tmp_path / "model_best.pth")["evaluated"] == "model"


def _average(rank, folder):
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(Net(), broadcast_buffers=False)
    trainer = SimpleTrainer(ddp, [torch.full((2, 3), float(rank + 1)).cumsum(0)], sgd(ddp))
    trainer.register_hooks([hook := EMAHook(0.5)])
    trainer.train(0, 3)
    return hook.state_dict()


def test_every_rank_has_the_same_averaged_parameters_and_buffers_of_its_own(tmp_path):
    first, second = on_two_ranks([_average], tmp_path)["_average"]
    assert first["steps"] == second["steps"] == 3
    different = {
        name
        for name, value in first["model"].items()
        if not torch.equal(value, second["model"][name])
    }
    assert different == {"layers.0.running_mean", "layers.0.running_var"}


def test_an_average_of_another_shape_is_refused_and_not_repeated_to_the_shape_of_the_model():
    average = ModelAverage(nn.Linear(2, 2), averaging_rule("exponential", 0.5))
    saved = {**average.state_dict(), "bias": torch.ones(1)}
    with pytest.raises(ValueError, match=r"'bias' has shape \[1\], and here \[2\]"):
        average.load_state_dict(saved)
