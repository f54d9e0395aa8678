"""DefaultTrainer: what is assembled, in which order, and what can be overridden."""

import json
import weakref
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.engine.job import TinyClassifier, tiny_cfg
from trainkit.config import ConfigError
from trainkit.data import DatasetCatalog, build_train_loader
from trainkit.engine import AMPTrainer, DefaultTrainer, EvaluationRun, HookBase, hooks
from trainkit.engine.defaults.build import make_step_trainer
from trainkit.evaluation import DatasetEvaluator
from trainkit.utils.events import JSONWriter
from trainkit.utils.periods import Period
from trainkit.utils.plugins import find_plugins


def rows(output_dir, name="metrics.json"):
    return [json.loads(line) for line in (output_dir / name).read_text().splitlines()]


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_default_hooks_stand_in_their_fixed_order(tmp_path):
    every = [
        "CHECKPOINT.BEST_METRIC",
        "classification/top1",
        "EARLY_STOPPING.METRIC",
        "classification/top1",
    ]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *every, "DATASETS.VAL", ("tiny_val",)))
    trainer.register_hooks([hooks.CallbackHook(), HookBase()])
    assert [
        name
        for hook in trainer.hooks
        if (name := type(hook).__name__) not in find_plugins().run_hooks
    ] == [
        "IterationTimer",
        "LRScheduler",
        "CallbackHook",
        "HookBase",
        "PeriodicCheckpointer",
        "EvalHook",
        "BestCheckpointer",
        "EarlyStopping",
        "FinalEvalHook",
        "PeriodicWriter",
    ]


@pytest.mark.filterwarnings("ignore:for (weight|bias). copying from a non-meta parameter")
def test_the_model_of_a_subclass_is_moved_to_the_device_of_the_config(tmp_path):
    class Trainer(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            return nn.Linear(4, 2)

    trainer = Trainer(tiny_cfg(tmp_path))
    trainer.checkpointer.save("weights")
    cfg = tiny_cfg(tmp_path, "MODEL.DEVICE", "meta", "MODEL.WEIGHTS", str(tmp_path / "weights.pth"))
    for owner in (Trainer(cfg), EvaluationRun(cfg, Trainer)):
        assert owner.model.weight.device.type == "meta"


def test_every_build_method_can_be_overridden_and_they_are_called_in_this_order(tmp_path):
    class Count(DatasetEvaluator):
        num = 0

        def process(self, inputs, outputs):
            self.num += len(inputs)

        def evaluate(self):
            return {"count": {"samples": self.num}}

    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    makers = {
        "build_model": lambda cls, cfg: Net(3, 1),
        "build_optimizer": lambda cls, cfg, model: torch.optim.RMSprop(model.parameters(), lr=0.5),
        "build_train_loader": lambda cls, cfg: [torch.ones(2, 3)],
        "build_lr_scheduler": lambda cls, cfg, optimizer: LambdaLR(
            optimizer, lambda iter: 0.5**iter
        ),
        "build_test_loader": lambda cls, cfg, name: [torch.ones(5, 3), torch.ones(2, 3)],
        "build_evaluator": lambda cls, cfg, name: Count(),
    }
    built = []

    def noting(name):
        return classmethod(lambda *arguments: built.append(name) or makers[name](*arguments))

    more = {"build_writers": lambda self: [JSONWriter(tmp_path / "mine.json")]}
    more["build_hooks"] = lambda self: [*DefaultTrainer.build_hooks(self), None]
    trainer_class = type(
        "Trainer", (DefaultTrainer,), {name: noting(name) for name in makers} | more
    )
    trainer = trainer_class(tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 4))
    assert built == [*makers][:4]
    assert trainer.train() == {"count": {"samples": 7}}
    assert trainer.optimizer.param_groups[0]["lr"] == 0.03125
    assert [row["iteration"] for row in rows(tmp_path, "mine.json")] == [1, 3, 4]


def test_a_step_trainer_that_is_put_in_calls_the_hooks_and_with_a_part_that_another_does_not_have_is_refused(
    tmp_path,
):
    def make(model=None, optimizer=None):
        trainer = DefaultTrainer(tiny_cfg(tmp_path))
        parts = (model or trainer.model, trainer.data_loader, optimizer or trainer.optimizer)
        trainer._trainer = AMPTrainer(*parts, precision=torch.bfloat16)
        return trainer

    with pytest.raises(
        ValueError, match="not the one that the checkpointer saves; return it in build_model"
    ):
        make(model=TinyClassifier(None)).train()
    with pytest.raises(ValueError, match=r"the learning rates of another optimizer"):
        make(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)).train()
    trainer, seen = make(), []
    trainer.register_hooks([hooks.CallbackHook(after_backward=lambda t: seen.append(t.iter))])
    trainer.train()
    assert trainer.status == "finished"
    assert seen == [*range(10)]


@pytest.mark.parametrize("keeps_place", [True, False])
def test_a_loader_put_in_by_a_hook_goes_on_at_the_place_that_it_is_given(tmp_path, keeps_place):
    def train(swap_at):
        def swap(trainer):
            if trainer.iter == swap_at:
                place = trainer.data_loader.state_dict()
                opposite = [
                    sample | {"x": -sample["x"]} for sample in DatasetCatalog.get("tiny_train")
                ]
                trainer.reset_data_loader(lambda: build_train_loader(trainer.cfg, opposite))
                if keeps_place:
                    trainer.data_loader.load_state_dict(place)

        shown = []
        note = {
            "after_backward": lambda trainer: shown.append(trainer.batch["x"]),
            "after_step": swap,
        }
        options = [
            "DATALOADER.NUM_WORKERS",
            2,
            "SOLVER.MAX_ITER",
            6,
            "TEST.EVAL_PERIOD",
            0,
            "TEST.EVALUATORS",
            [],
        ]
        trainer = DefaultTrainer(tiny_cfg(tmp_path, *options))
        trainer.register_hooks([hooks.CallbackHook(**note)])
        trainer.train()
        return torch.stack(shown)

    data = train(swap_at=-1)
    assert torch.equal(
        train(swap_at=2), torch.cat([data[:3], -(data[3:] if keeps_place else data[:3])])
    )


@pytest.mark.parametrize(("start", "evaluated"), [(0, [2, 5, 8, 10]), (5, [4, 7, 10])])
def test_the_scalars_of_a_hook_and_each_evaluation_are_written(tmp_path, start, evaluated):
    options = ("LOG.WINDOW", 1, "LOG.PERIOD", 1000, "TEST.EVAL_PERIOD", 3, "TEST.EVAL_START", start)
    trainer = DefaultTrainer(
        tiny_cfg(tmp_path, *options, "CHECKPOINT.BEST_METRIC", ["classification/top1"])
    )
    square = hooks.CallbackHook(after_step=lambda t: t.storage.put_scalar("square", t.iter**2))
    trainer.register_hooks([square])
    trainer.train()
    assert [row["iteration"] for row in rows(tmp_path) if "classification/top1" in row] == evaluated
    # with the evaluations, and at the end
    written = [iter for iter in evaluated if iter < 10] + [9]
    assert [row["square"] for row in rows(tmp_path) if "square" in row] == [
        iter**2 for iter in written
    ]
    best = next(hook for hook in trainer.hooks if isinstance(hook, hooks.BestCheckpointer))
    assert best.best_iter in written


@pytest.mark.parametrize(("precision", "scaled"), [("float16", True), ("bfloat16", False)])
def test_amp_of_the_config_makes_an_amp_trainer_that_keeps_every_setting(
    tmp_path, precision, scaled
):
    options = [
        "SOLVER.AMP.ENABLED",
        True,
        "SOLVER.AMP.PRECISION",
        precision,
        "LOG.ASYNC",
        True,
        "LOG.GATHER_PERIOD",
        2,
    ]
    options += ["SOLVER.ACCUMULATION_STEPS", 2, "SOLVER.ZERO_GRAD_BEFORE_FORWARD", True]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options))
    assert trainer.precision == getattr(torch, precision)
    assert trainer.grad_scaler.is_enabled() is scaled
    assert trainer.metrics.gather_period == 2
    assert trainer.metrics.exchange_period == 1
    assert trainer.accumulation_steps == 2
    parts = trainer.model, trainer.data_loader, trainer.optimizer
    step_trainer = make_step_trainer(trainer.cfg, *parts)
    assert isinstance(step_trainer, AMPTrainer)
    assert step_trainer.async_write_metrics is True
    assert step_trainer.zero_grad_before_forward is True


def test_with_amp_the_forward_pass_is_in_bfloat16_and_an_evaluation_in_float32(tmp_path):
    options = ["SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16"]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options, "SOLVER.MAX_ITER", 2))
    seen = set()
    trainer.model.layers.register_forward_hook(
        lambda layers, inputs, output: seen.add((layers.training, output.dtype))
    )
    trainer.train()
    assert seen == {(True, torch.bfloat16), (False, torch.float32)}


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ([], (65536, 32768)),
        (["SOLVER.AMP.INIT_SCALE", 8.0], (8, 4)),
        (["SOLVER.AMP.LOSS_SCALE", 128, "SOLVER.AMP.INIT_SCALE", 8.0], (128, 128)),
    ],
    ids=str,
)
def test_a_dynamic_loss_scale_halves_after_an_overflow_and_a_number_stays(
    tmp_path, options, scales
):
    scaler = DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.AMP.ENABLED", True, *options)).grad_scaler
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler.scale(weight * torch.inf).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    assert (before, scaler.get_scale()) == scales


def test_ranks_exchange_metrics_once_per_log_period(tmp_path):
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "LOG.PERIOD", "2ep"))
    assert trainer.metrics.exchange_period == 10


@pytest.mark.parametrize("is_endless", [True, False])
def test_4_epochs_are_4_passes_over_the_data_to_within_an_iteration(tmp_path, is_endless):
    class Trainer(DefaultTrainer):
        @classmethod
        def build_train_loader(cls, cfg):
            data = [{"x": torch.ones(4), "label": 0}] * 1197
            return build_train_loader(cfg, data) if is_endless else DataLoader(data, batch_size=64)

    options = (
        "SOLVER.MAX_ITER",
        "4ep",
        "SOLVER.IMS_PER_BATCH",
        64,
        "SOLVER.ACCUMULATION_STEPS",
        16,
    )
    trainer = Trainer(
        tiny_cfg(tmp_path, *options, "TEST.EVAL_PERIOD", "1ep", "SOLVER.WARMUP_ITERS", 0)
    )
    if is_endless:
        assert trainer.max_iter == 5
    else:  # of whole batches, the last of each pass being smaller
        assert trainer.epoch_length == Fraction(19, 16)
    assert abs(trainer.max_iter - 4 * trainer.epoch_length) <= 0.5


def test_everything_in_epochs_happens_where_epochs_end_also_if_they_are_not_whole_and_is_resumed(
    tmp_path,
):
    options = (
        "SOLVER.ACCUMULATION_STEPS",
        3,
        "SOLVER.MAX_ITER",
        "6ep",
        "SOLVER.CHECKPOINT_PERIOD",
        "2ep",
    )
    cfg = tiny_cfg(tmp_path, *options, "TEST.EVAL_PERIOD", "1ep", "SOLVER.STEPS", ["3ep"])
    trainer = DefaultTrainer(cfg)  # 40 samples, 24 in an iteration
    assert trainer.iters_per_epoch == 2
    assert trainer.epoch_length == Fraction(5, 3)
    assert trainer.cfg.SOLVER.STEPS == (5,)
    assert cfg.SOLVER.MAX_ITER == "6ep"
    ends, evaluated = [], []

    class Note(HookBase):
        def after_epoch(self):
            ends.append(self.trainer.iter + 1)

        def before_eval(self, phase, name):
            evaluated.append(self.trainer.done)

    trainer.register_hooks([Note()])
    trainer.train()
    assert ends == evaluated == [2, 3, 5, 7, 8, 10]
    files = sorted(path.name for path in tmp_path.glob("*.pth"))
    assert files == ["model_0000002.pth", "model_0000006.pth", "model_final.pth"]

    resumed = DefaultTrainer(cfg)
    resumed.register_hooks([Note()])
    resumed.resume_or_load()
    assert resumed.status == "finished"
    assert resumed.start_iter == 10
    assert Period(Fraction(5, 3)) == trainer.cfg.TEST.EVAL_PERIOD
    assert trainer.max_iter == 10


def test_a_run_leaves_its_files_and_returns_the_results(tmp_path):
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "CHECKPOINT.BEST_METRIC", "classification/top1"))
    assert set(trainer.train()) == {"classification"}
    assert trainer.status == "finished"
    gone = weakref.ref(trainer)
    del trainer  # nobody else holds it
    assert gone() is None
    assert {path.name for path in tmp_path.iterdir()} == {
        *(
            "model_0000004.pth",
            "model_final.pth",
            "model_best.pth",
            "metrics.json",
            "last_checkpoint",
            "run_id",
            "finished",
        )
    }
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def test_results_of_one_dataset_stand_alone_and_those_of_several_under_their_names(tmp_path):
    model, seen = TinyClassifier(None), []
    one = DefaultTrainer.test(tiny_cfg(tmp_path), model)
    two = DefaultTrainer.test(tiny_cfg(tmp_path, "DATASETS.TEST", ("tiny_test", "tiny_val")), model)
    assert set(one) == {"classification"}
    assert set(two) == {"tiny_test", "tiny_val"}
    assert two["tiny_test"] == one
    with pytest.raises(
        ValueError, match=r"need one evaluator per dataset in \('tiny_test',\), got 2"
    ):
        DefaultTrainer.test(tiny_cfg(tmp_path), model, [DatasetEvaluator(), DatasetEvaluator()])
    evaluator = DatasetEvaluator()
    evaluator.process = lambda inputs, outputs: seen.append(len(outputs))
    DefaultTrainer.test(tiny_cfg(tmp_path, "TEST.MAX_BATCHES", 2), model, evaluator)
    assert seen == [4, 4]


def test_unexpected_results_end_the_process_with_code_1_and_without_an_evaluator_there_are_none(
    tmp_path, caplog
):
    with pytest.raises(SystemExit, match="^1$"):
        DefaultTrainer(
            tiny_cfg(
                tmp_path / "1", "TEST.EXPECTED_RESULTS", [["classification", "top1", -1000.0, 50.0]]
            )
        ).train()
    assert DefaultTrainer(tiny_cfg(tmp_path / "2", "TEST.EVALUATORS", [])).train() == {}
    assert "name evaluators in TEST.EVALUATORS" in caplog.text
    for key in ("VAL", "TEST"):
        with pytest.raises(ConfigError, match=f"DATASETS.{key}: DatasetCatalog has no 'tiny_tset'"):
            DefaultTrainer(tiny_cfg(tmp_path / key, f"DATASETS.{key}", ("tiny_tset",)))


def test_a_run_that_failed_goes_on_in_the_same_process_or_is_resumed_after_its_last_checkpoint(
    tmp_path, caplog
):
    class Counter(HookBase):
        _state_names = ("count",)
        count = 0

        def before_step(self):
            self.count += 1
            if self.count == 8:
                raise RuntimeError("power cut")

    first, seen = (
        DefaultTrainer(tiny_cfg(tmp_path, "CHECKPOINT.BEST_METRIC", "classification/top1")),
        [],
    )
    first.register_hooks([hooks.CallbackHook(before_step=lambda t: seen.append(t.iter)), Counter()])
    with pytest.raises(RuntimeError, match="power cut"):
        first.train()
    first.train(max_iter=9)
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8]
    (tmp_path / "last_checkpoint").write_text("model_0000004.pth")

    second, counter, lrs = DefaultTrainer(tiny_cfg(tmp_path)), Counter(), []
    second.resume_or_load(resume=True)
    second.register_hooks([counter])  # which gets its state
    second.register_hooks(
        [hooks.CallbackHook(before_step=lambda t: lrs.append(t.optimizer.param_groups[0]["lr"]))]
    )
    assert second.start_iter == 5
    assert counter.count == 5
    counter.count += 100
    momentum = next(iter(second.optimizer.state.values()))["momentum_buffer"]
    assert momentum.abs().sum() > 0
    second.train()
    assert lrs == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01])
    assert second.iter == 10
    assert "not registered: ['BestCheckpointer']" in caplog.text


@pytest.mark.parametrize("loads", [False, True])
def test_a_start_that_has_not_loaded_the_weights_of_the_config_is_a_warning(
    tmp_path, caplog, loads
):
    DefaultTrainer(tiny_cfg(tmp_path / "old")).train()
    weights_file = str(tmp_path / "old/model_final.pth")
    trainer = DefaultTrainer(tiny_cfg(tmp_path / "new", "MODEL.WEIGHTS", weights_file))
    if loads:
        trainer.resume_or_load(resume=False)
    trainer.train()
    assert (f"MODEL.WEIGHTS '{weights_file}' is not loaded" in caplog.text) is not loads


def test_a_trainer_chooses_the_device_itself_if_no_setup_has(tmp_path):
    cfg = tiny_cfg(tmp_path, "MODEL.DEVICE", "auto")
    cfg.freeze()
    trainer = DefaultTrainer(cfg)
    of_model = next(trainer.model.parameters()).device.type
    assert torch.device(trainer.cfg.MODEL.DEVICE).type == of_model


def test_weights_alone_start_a_run_at_iteration_0_and_resuming_beyond_the_end_is_an_error(tmp_path):
    old = DefaultTrainer(tiny_cfg(tmp_path / "old"))
    old.train()
    new = DefaultTrainer(
        tiny_cfg(tmp_path / "new", "MODEL.WEIGHTS", str(tmp_path / "old/model_final.pth"))
    )
    new.resume_or_load(resume=True)
    assert new.start_iter == 0
    assert equal(weights(new), weights(old))
    assert not any(state["momentum_buffer"].any() for state in new.optimizer.state.values())
    trainer = DefaultTrainer(tiny_cfg(tmp_path / "old", "SOLVER.MAX_ITER", 4, "SOLVER.STEPS", ()))
    with pytest.raises(
        ConfigError,
        match="SOLVER.MAX_ITER is 4, but the checkpoint to resume from has done 10 iter",
    ):
        trainer.resume_or_load()


def test_none_in_place_of_an_empty_text_switches_a_feature_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = ["CHECKPOINT.DIR", "CHECKPOINT.FORMAT", "CHECKPOINT.BEST_METRIC", "MODEL.WEIGHTS"]
    keys += ["SOLVER.TRAINER", "SOLVER.OPTIMIZER_BUILDER", "SOLVER.LR_SCHEDULER_BUILDER"]
    keys += ["SOLVER.PARAM_GROUP_BUILDER", "EARLY_STOPPING.METRIC", "INPUT.TEST_TRANSFORM"]
    trainer = DefaultTrainer(tiny_cfg("run", *(word for key in keys for word in (key, "None"))))
    trainer.resume_or_load(resume=False)
    trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert {"model_0000004.pth", "model_final.pth"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


class Unfreeze(HookBase):
    def before_step(self):
        if self.trainer.iter == 4:
            self.trainer.model.requires_grad_(True)


class PartlyFrozen(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg):
        model = super().build_model(cfg)
        next(model.parameters()).requires_grad_(False)
        return model


class WithCritic(PartlyFrozen):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.critic = torch.optim.SGD([next(self.model.parameters())], lr=0.1)


@pytest.mark.parametrize(("trainer_class", "num_warnings"), [(PartlyFrozen, 1), (WithCritic, 0)])
def test_a_parameter_that_is_unfrozen_but_in_no_optimizer_of_the_trainer_is_named(
    tmp_path, caplog, trainer_class, num_warnings
):
    trainer = trainer_class(tiny_cfg(tmp_path))
    trainer.register_hooks([Unfreeze()])
    trainer.train()
    name = next(iter(trainer.model.state_dict()))
    texts = [text for text in caplog.messages if "but are in no optimizer" in text]
    assert [f": {name}. " in text for text in texts] == [True] * num_warnings


def test_the_length_of_histories_bounds_what_a_checkpoint_holds_also_if_it_gets_shorter(tmp_path):
    def run(length, max_iter):
        keys = ("LOG.HISTORY_LENGTH", length, "LOG.WINDOW", 5, "SOLVER.MAX_ITER", max_iter)
        trainer = DefaultTrainer(tiny_cfg(tmp_path, *keys))
        trainer.resume_or_load(resume=True)
        trainer.train()
        state = torch.load(tmp_path / "model_final.pth", weights_only=True)
        return state["trainer"]["storage"]["histories"]["total_loss"]

    long = run(8, 10)
    assert long["iterations"].tolist() == [*range(2, 10)]
    short = run(5, 12)
    assert short["iterations"].tolist() == [*range(7, 12)]
    assert torch.equal(short["values"][:3], long["values"][-3:])
    assert short["count"] == 12
    with pytest.raises(ConfigError, match="LOG.HISTORY_LENGTH.* got 4.*at least LOG.WINDOW, 5"):
        run(4, 12)
