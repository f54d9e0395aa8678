"""Trainers in the manner of detrex, AdelaiDet and unbiased-teacher: each runs, is saved, resumed and compared."""

import itertools
import math
import time
import weakref

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, Weight, batches, scalars, sgd
from tests.exactness.jobs import Configured
from tests.exactness.machine import check
from trainkit.checkpoint import Checkpointer
from trainkit.engine import DefaultTrainer, SimpleTrainer, hooks
from trainkit.solver import GradientClipper
from trainkit.utils.events import EventStorage


def weights(model):
    return [parameter.clone() for parameter in model.parameters()]


def equal(ours, theirs):
    return all(map(torch.equal, ours, theirs))


class DetrexLike(SimpleTrainer):
    """Calls the parts of detectron2's engine itself."""

    def run_step(self):
        assert self.model.training
        start = time.perf_counter()
        data = next(self._data_loader_iter)
        data_time = time.perf_counter() - start
        losses = self.model(data)
        loss_dict = {"total": losses}
        self.optimizer.zero_grad()
        losses.backward()
        if self.async_write_metrics:
            self.concurrent_executor.submit(
                self._write_metrics, loss_dict, data_time, iter=self.iter
            )
        else:
            self._write_metrics(loss_dict, data_time)
        self.optimizer.step()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_step_that_writes_metrics_itself_stores_what_ours_stores(asynchronous):
    def trained(trainer_class):
        model = Regression()
        trainer = trainer_class(
            model, itertools.cycle(batches(4)), sgd(model), 2, async_write_metrics=asynchronous
        )
        trainer.train(0, 6)
        return weights(model), scalars(trainer)["total_loss"]

    ours, theirs = trained(SimpleTrainer), trained(DetrexLike)
    assert equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    assert [iter for _, iter in theirs[1]] == [1, 3, 5]


class Noting(SimpleTrainer):
    """Notes each call of `_write_metrics`, then lets trainkit store the values."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def _write_metrics(self, loss_dict, data_time, prefix="", iter=None):
        values = {name: value.item() for name, value in loss_dict.items()}
        self.calls.append((self.iter if iter is None else iter, values))
        super()._write_metrics(loss_dict, data_time, prefix, iter)


class Adding(SimpleTrainer):
    """Gives trainkit another dict, with one more value."""

    def _write_metrics(self, loss_dict, data_time, prefix="", iter=None):
        super()._write_metrics({**loss_dict, "twice": 2 * loss_dict["a"].detach()}, data_time)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_override_of_writing_is_called_in_each_iteration_and_what_it_passes_on_is_stored_once(
    asynchronous,
):
    def trained(trainer_class):
        model = Weight(
            lambda weight, batch: {"a": weight * batch, "b": weight / 4, "number": batch + 1}
        )
        options = {
            "async_write_metrics": asynchronous,
            "clip_gradients": GradientClipper("full_model", 100.0),
        }
        trainer = trainer_class(
            model, [torch.tensor(float(i)) for i in range(30)], sgd(model, 0.125), 2, **options
        )
        trainer.train(0, 30)
        return trainer

    ours, noting, adding = trained(SimpleTrainer), trained(Noting), trained(Adding)
    assert scalars(ours) == scalars(noting)
    assert scalars(ours).keys() == {"total_loss", "a", "b", "number", "grad_norm"}
    assert [iter for _, iter in noting.storage.history("data_time").values()] == [*range(1, 30, 2)]
    assert [iter for iter, _ in noting.calls] == [*range(30)]
    for name in ("a", "b", "number"):
        gathered = [(values[name], iter) for iter, values in noting.calls if iter % 2 == 1]
        assert gathered == [*scalars(ours)[name]]
    # the value that is only logged is no part of the total
    assert scalars(adding)["total_loss"] == scalars(ours)["total_loss"]
    assert [*scalars(adding)["twice"]] == [(2 * a, iter) for a, iter in scalars(ours)["a"]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_override_that_stores_nothing_leaves_nothing_stored_and_the_model_is_still_checked(
    asynchronous,
):
    class Silent(SimpleTrainer):
        def _write_metrics(self, loss_dict, data_time, prefix="", iter=None):
            seen.append({name: value.item() for name, value in loss_dict.items()})

    seen = []
    model = Weight()
    data = [torch.tensor(value) for value in (1.0, 1.0, math.nan)]
    trainer = Silent(model, data, sgd(model, 0.25), async_write_metrics=asynchronous)
    with pytest.raises(FloatingPointError, match=r"the model is not finite in iteration 3.*weight"):
        trainer.train(0, 3)
    assert trainer.storage.histories() == {}
    assert [value["total_loss"] for value in seen[:2]] == [1.0, 0.75]
    assert math.isnan(seen[2]["total_loss"])


class SelfBuilt(DefaultTrainer):
    """Builds its parts itself; only the constructor of TrainerBase is called."""

    def __init__(self, cfg):
        super(DefaultTrainer, self).__init__()
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        self._trainer = SimpleTrainer(model, self.build_train_loader(cfg), optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self))
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.cfg = cfg
        self.register_hooks(self.build_hooks())


class OwnLoop(SelfBuilt):
    """Its train() is a loop of its own, as in unbiased-teacher."""

    def train(self):
        self.iter = self.start_iter
        with EventStorage(self.start_iter) as self.storage:
            try:
                self.before_train()
                for self.iter in range(self.start_iter, self.max_iter):  # noqa: B020
                    self.before_step()
                    self.run_step()
                    self.after_step()
            finally:
                self.after_train()


def test_a_trainer_with_a_loop_of_its_own_trains_evaluates_saves_and_goes_on(tmp_path):
    def run(folder, max_iter, resume=False):
        trainer = OwnLoop(tiny_cfg(folder, "SOLVER.MAX_ITER", max_iter))
        trainer.resume_or_load(resume=resume)
        trainer.train()
        assert trainer.status == "finished"
        return trainer

    whole = run(tmp_path / "whole", 10)
    assert {"model_0000004.pth", "model_final.pth", "metrics.json"} <= {
        f.name for f in (tmp_path / "whole").iterdir()
    }
    assert [iter for _, iter in whole.storage.history("classification/top1").values()] == [4, 9]
    assert whole._last_eval_results.keys() == whole.test(whole.cfg, whole.model).keys()
    run(tmp_path / "parts", 5)
    assert run(tmp_path / "parts", 10, resume=True).start_iter == 5

    seen = []  # a failure in this loop is one for the hooks
    trainer = OwnLoop(tiny_cfg(tmp_path / "failed"))
    trainer.register_hooks(
        [hooks.CallbackHook(after_train=lambda trainer: seen.append(trainer.status))]
    )
    trainer.run_step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert seen == ["failed"]


class WalksOverHooks(DefaultTrainer):
    """Overrides what calls the hooks, to add something of its own; forks of Mask2Former do so."""

    def before_step(self):
        self.storage.iter = self.iter
        for hook in self._hooks:
            hook.before_step()

    def after_step(self):
        for hook in self._hooks:
            hook.after_step()
        self.storage.put_scalar("mine", self.iter, smoothing_hint=False)


def test_hooks_that_a_trainer_calls_itself_do_everything_once(tmp_path):
    calls = []
    count = hooks.CallbackHook(after_step=lambda trainer: calls.append(trainer.iter))
    trainers = []
    for trainer_class in (DefaultTrainer, WalksOverHooks):
        torch.manual_seed(3)
        trainers.append(trainer_class(tiny_cfg(tmp_path / trainer_class.__name__)))
        trainers[-1].register_hooks([count])
        trainers[-1].train()
    default, walking = trainers
    assert calls == [*range(10)] * 2
    assert [*scalars(walking)["mine"]] == [(float(i), i) for i in range(10)]
    for name in ("classification/top1", "total_loss"):
        assert walking.storage.history(name).values() == default.storage.history(name).values()
    assert equal(weights(default.model), weights(walking.model))


def test_results_of_the_last_evaluation_are_where_detectron2_has_them_unless_its_hook_is_taken_out(
    tmp_path,
):
    trainer = DefaultTrainer(tiny_cfg(tmp_path / "all"))
    assert not hasattr(trainer, "_last_eval_results")
    results = trainer.train()
    assert results == trainer._last_eval_results
    assert (
        results["classification"]["top1"] == trainer.storage.history("classification/top1").latest()
    )
    trainer = DefaultTrainer(tiny_cfg(tmp_path / "without"))
    trainer._hooks.pop(
        next(i for i, hook in enumerate(trainer._hooks) if isinstance(hook, hooks.EvalHook))
    )
    trainer.train()
    assert not hasattr(trainer, "_last_eval_results")


class EditsHooks(DefaultTrainer):
    """Takes the list of ``build_hooks`` for one to edit by index."""

    def build_hooks(self):
        built = super().build_hooks()
        for i, hook in enumerate(built):
            if isinstance(hook, hooks.PeriodicCheckpointer):
                built[i] = hooks.PeriodicCheckpointer(self.checkpointer, 3, max_to_keep=2)
        evaluation = next(i for i, hook in enumerate(built) if isinstance(hook, hooks.EvalHook))
        built[evaluation] = hooks.EvalHook(4, lambda: {"answer": 42.0})
        late = hooks.CallbackHook(
            after_step=lambda trainer: trainer.storage.put_scalar("late", trainer.iter)
        )
        built.insert(-1, late)
        return built


def test_a_list_of_hooks_that_is_edited_by_index_is_the_list_that_runs(tmp_path):
    whole = EditsHooks(tiny_cfg(tmp_path / "whole"))
    whole.train()
    assert [iter for _, iter in whole.storage.history("answer").values()] == [3, 7, 10]
    assert [iter for _, iter in whole.storage.history("late").values()] == [*range(10)]
    files = {path.name for path in (tmp_path / "whole").glob("model_*.pth")}
    assert files == {"model_0000005.pth", "model_0000008.pth", "model_final.pth"}


@pytest.mark.parametrize("trainer_class", [SelfBuilt, WalksOverHooks, EditsHooks])
def test_such_trainers_resume_exactly(tmp_path, trainer_class):
    check(Configured(trainer_class=trainer_class), tmp_path)


CLIP = {"ENABLED": True, "CLIP_TYPE": "full_model", "CLIP_VALUE": 1e-3}
OPTIONS = [
    item for key, option in CLIP.items() for item in (f"SOLVER.CLIP_GRADIENTS.{key}", option)
]


class OwnStep(DefaultTrainer):
    """Steps the optimizer itself, as trainers of unbiased-teacher do."""

    def run_step(self):
        batch = next(self._trainer._data_loader_iter)
        losses = self.model(batch)
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        self._trainer._write_metrics(losses, 0.0)
        self.optimizer.step()


class Mask2FormerLike(DefaultTrainer):
    """Its optimizer clips the norm of the whole model in a step() of its own."""

    @classmethod
    def build_optimizer(cls, cfg, model):
        class FullModelClipping(torch.optim.AdamW):
            def step(self, closure=None):
                params = itertools.chain(*[group["params"] for group in self.param_groups])
                nn.utils.clip_grad_norm_(params, cfg.SOLVER.CLIP_GRADIENTS.CLIP_VALUE)
                super().step(closure=closure)

        return FullModelClipping(model.parameters(), 0.1)


@pytest.mark.parametrize("trainer_class", [DefaultTrainer, OwnStep, Mask2FormerLike])
def test_a_default_trainer_clips_whoever_makes_its_step(tmp_path, trainer_class):
    trainer = trainer_class(tiny_cfg(tmp_path, *OPTIONS))
    norms = []  # of the gradients that each update has seen

    def note(optimizer, args, kwargs):
        grads = [
            parameter.grad for group in optimizer.param_groups for parameter in group["params"]
        ]
        norms.append(nn.utils.get_total_norm(grads).item())

    trainer.optimizer.register_step_post_hook(note)
    trainer.train()
    assert len(norms) >= 10  # torch may call the hook for the step inside of a step too
    assert norms == [pytest.approx(1e-3, rel=1e-3)] * len(norms)
    assert ("grad_norm" in trainer.storage.histories()) is (trainer_class is not OwnStep)
    # that before clipping
    assert all(value > 0.01 for value, _ in scalars(trainer).get("grad_norm", []))
