"""Trainers in the manner of detrex, AdelaiDet and unbiased-teacher: each runs, is saved, resumed and compared."""

import itertools
import math
import time
import weakref
from functools import partial
from threading import get_ident

import pytest
import torch

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, Weight, batches, defer, scalars, sgd
from trainkit.checkpoint import Checkpointer
from trainkit.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, TrainerBase, hooks
from trainkit.solver import GradientClipper
from trainkit.utils.events import EventStorage, JSONWriter


def weights(model):
    return [parameter.clone() for parameter in model.parameters()]


def equal(ours, theirs):
    return all(map(torch.equal, ours, theirs))


# ---------------------------------------------------------------------- a run_step of one's own


class DetrexLike(SimpleTrainer):
    """Calls the parts of detectron2's engine itself."""

    def run_step(self):
        assert self.model.training
        start = time.perf_counter()
        data = next(self._data_loader_iter)
        data_time = time.perf_counter() - start
        loss_dict = self.model(data)
        losses = sum(loss_dict.values()) if isinstance(loss_dict, dict) else loss_dict
        loss_dict = loss_dict if isinstance(loss_dict, dict) else {"total": losses}
        self.optimizer.zero_grad()
        losses.backward()
        if self.async_write_metrics:
            self.concurrent_executor.submit(self._write_metrics, loss_dict, data_time, iter=self.iter)
        else:
            self._write_metrics(loss_dict, data_time)
        self.optimizer.step()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_step_that_writes_metrics_itself_stores_what_ours_stores(asynchronous):
    def trained(trainer_class):
        model = Regression()
        trainer = trainer_class(model, itertools.cycle(batches(4)), sgd(model), 2, async_write_metrics=asynchronous)
        trainer.train(0, 6)
        return weights(model), scalars(trainer)["total_loss"]

    ours, theirs = trained(SimpleTrainer), trained(DetrexLike)
    assert equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    assert [iter for _, iter in theirs[1]] == [1, 3, 5]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_such_a_step_writes_in_the_worker_ends_the_run_if_it_fails(asynchronous):
    model = Regression()
    with torch.no_grad():
        model.linear.weight.fill_(torch.inf)
    trainer = DetrexLike(
        model, itertools.cycle(batches(4)), sgd(model), async_write_metrics=asynchronous, non_finite="ignore"
    )
    with pytest.raises(FloatingPointError, match="the loss is not finite in iteration 0"):
        trainer.train(0, 50)
    assert trainer.status == "failed"


def noting(trainer_class, calls, kind):
    """A subclass that notes each call of what it overrides, then lets trainkit store the values."""

    def note(loss_dict, data_time, iter):
        on_time = data_time >= 0
        calls.append((iter, {name: value.item() for name, value in loss_dict.items()}, on_time, get_ident()))

    class WritesMetrics(trainer_class):
        def _write_metrics(self, loss_dict, data_time, prefix="", iter=None):
            note(loss_dict, data_time, self.iter if iter is None else iter)
            super()._write_metrics(loss_dict, data_time, prefix, iter)

    class WritesStatically(trainer_class):
        @staticmethod
        def write_metrics(loss_dict, data_time, cur_iter, prefix=""):
            note(loss_dict, data_time, cur_iter)
            SimpleTrainer.write_metrics(loss_dict, data_time, cur_iter, prefix)

    return {"_write_metrics": WritesMetrics, "write_metrics": WritesStatically}[kind]


def bf16(trainer_class):
    return partial(trainer_class, precision=torch.bfloat16) if issubclass(trainer_class, AMPTrainer) else trainer_class


@pytest.mark.parametrize("kind", ["_write_metrics", "write_metrics"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("trainer_class", [SimpleTrainer, AMPTrainer])
def test_an_override_of_writing_is_called_once_per_gathered_iteration_and_values_are_stored_once(
    kind, asynchronous, trainer_class
):
    def trained(own_class):
        model = Weight(lambda weight, batch: {"a": weight * batch, "b": weight / 4, "number": batch + 1})
        trainer = bf16(own_class)(
            model,
            [torch.tensor(float(i)) for i in range(30)],
            sgd(model, 0.125),
            2,
            async_write_metrics=asynchronous,
            clip_gradients=GradientClipper("full_model", 100.0),
        )
        trainer.train(0, 30)
        return trainer

    calls = []
    ours, theirs = trained(trainer_class), trained(noting(trainer_class, calls, kind))
    assert scalars(ours) == scalars(theirs)
    assert scalars(ours).keys() == {"total_loss", "a", "b", "number", "grad_norm"}
    for name in ("data_time", "rank_data_time"):
        assert [iter for _, iter in theirs.storage.history(name).values()] == [*range(1, 30, 2)]
    stored = {name: [value for value, _ in scalars(ours)[name]] for name in ("a", "b", "number")}
    rows = [dict(zip(stored, values, strict=True)) for values in zip(*stored.values(), strict=True)]
    assert [call[:3] for call in calls] == [(2 * i + 1, row, True) for i, row in enumerate(rows)]
    assert {thread == get_ident() for *_, thread in calls} == {not asynchronous}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_override_that_stores_nothing_leaves_nothing_stored_and_losses_are_still_checked(asynchronous):
    class Silent(SimpleTrainer):
        def _write_metrics(self, loss_dict, data_time, prefix="", iter=None):
            seen.append({name: value.item() for name, value in loss_dict.items()})

    seen = []
    model = Weight()
    data = [torch.tensor(value) for value in (1.0, 1.0, math.nan)]
    trainer = Silent(model, data, sgd(model, 0.25), async_write_metrics=asynchronous)
    with pytest.raises(FloatingPointError, match="the loss is not finite in iteration 2"):
        trainer.train(0, 3)
    assert trainer.storage.histories() == {}
    assert [value["total_loss"] for value in seen[:2]] == [1.0, 0.75]
    assert math.isnan(seen[2]["total_loss"])
    assert model.weight.item() == 0.5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_losses_of_micro_batches_are_summed_in_an_override_as_in_ours(asynchronous):
    def trained(trainer_class):
        model = Weight(lambda weight, batch: {"loss": weight * batch, "number": batch})
        data = [torch.tensor(float(i)) for i in range(8)]
        options = {"accumulation_steps": 2, "async_write_metrics": asynchronous}
        trainer = trainer_class(model, data, sgd(model, 0.125), **options)
        trainer.train(0, 4)
        return scalars(trainer)

    assert trained(SimpleTrainer) == trained(noting(SimpleTrainer, [], "_write_metrics"))


@pytest.mark.parametrize("kind", ["_write_metrics", "write_metrics"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_override_of_writing_is_called_in_the_inner_trainer_of_a_default_trainer(tmp_path, kind, asynchronous):
    calls = []

    class Replaced(DefaultTrainer):
        def __init__(self, cfg):
            super().__init__(cfg)
            inner = noting(SimpleTrainer, calls, kind)
            self._trainer = inner(self.model, self.data_loader, self.optimizer, async_write_metrics=asynchronous)

    trainer = Replaced(tiny_cfg(tmp_path))
    trainer.train()
    assert [iter for iter, *_ in calls] == [*range(10)]
    assert scalars(trainer)["total_loss"] == [(losses["loss_cls"], iter) for iter, losses, *_ in calls]


def test_a_run_step_of_ones_own_may_fetch_as_ours_and_hooks_read_the_batch():
    class Own(SimpleTrainer):
        def run_step(self):
            batch = self.draw()
            loss = self.model(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.after_backward()
            self.optimizer.step()

    seen = []
    model, data = Regression(), batches(2)
    trainer = Own(model, data, sgd(model))
    trainer.register_hooks([hooks.CallbackHook(after_step=lambda trainer: seen.append(trainer.batch))])
    trainer.train(0, 2)
    assert all(a is b for a, b in zip(seen, data, strict=True))


def test_an_iterator_that_is_let_go_by_hand_is_made_anew():
    drawn = []

    class Loader:
        def __iter__(self):
            for i in itertools.count():
                drawn.append(i)
                yield batches(1)[0]

    model = Regression()
    trainer = SimpleTrainer(model, Loader(), sgd(model))
    trainer.train(0, 2)
    assert trainer._data_loader_iter_obj is trainer._data_loader_iter
    trainer._data_loader_iter_obj = None
    trainer.train(0, 1)
    assert drawn == [0, 1, 0]


def test_an_optimizer_that_has_only_zero_grad_and_step_trains():
    class Wrapped:
        def __init__(self, optimizer):
            self._optimizer = optimizer

        def zero_grad(self):
            self._optimizer.zero_grad()

        def step(self):
            self._optimizer.step()

    def trained(wrap):
        model = Regression()
        trainer = SimpleTrainer(model, batches(4), wrap(sgd(model)))
        trainer.train(0, 4)
        return weights(model)

    assert equal(trained(lambda optimizer: optimizer), trained(Wrapped))


# ---------------------------------------------------------------------- trainers that build themselves


class SelfBuilt(DefaultTrainer):
    """Two models, as student and teacher; only the constructor of TrainerBase is called."""

    def __init__(self, cfg):
        super(DefaultTrainer, self).__init__()
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        self.teacher = self.build_model(cfg)
        self._trainer = SimpleTrainer(model, self.build_train_loader(cfg), optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, teacher=self.teacher, trainer=weakref.proxy(self))
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.cfg = cfg
        self.register_hooks(self.build_hooks())

    def run_step(self):
        super().run_step()
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                theirs.mul_(0.9).add_(ours, alpha=0.1)


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


@pytest.mark.parametrize("trainer_class", [SelfBuilt, OwnLoop])
def test_a_trainer_that_builds_itself_trains_evaluates_saves_and_goes_on(tmp_path, trainer_class):
    def run(folder, max_iter, resume=False):
        trainer = trainer_class(tiny_cfg(folder, "SOLVER.MAX_ITER", max_iter))
        trainer.resume_or_load(resume=resume)
        trainer.train()
        assert trainer.status == "finished"
        return trainer

    torch.manual_seed(3)
    whole = run(tmp_path / "whole", 10)
    assert {"model_0000004.pth", "model_final.pth", "metrics.json"} <= {f.name for f in (tmp_path / "whole").iterdir()}
    assert [iter for _, iter in whole.storage.history("classification/top1").values()] == [
        4,
        9 if trainer_class is OwnLoop else 10,
    ]
    assert whole._last_eval_results.keys() == whole.test(whole.cfg, whole.model).keys()

    torch.manual_seed(3)
    run(tmp_path / "parts", 5)
    torch.manual_seed(4)
    resumed = run(tmp_path / "parts", 10, resume=True)
    assert resumed.start_iter == 5
    for name in ("model", "teacher"):
        assert equal(weights(getattr(whole, name)), weights(getattr(resumed, name)))


class WithoutTrainerState(OwnLoop):
    """Keeps the optimizer and the schedule, and finds in the file how far it is, as before detectron2 0.4."""

    def __init__(self, cfg):
        super().__init__(cfg)
        state = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        self.checkpointer = Checkpointer(self.model, cfg.OUTPUT_DIR, **state)
        self._hooks.clear()
        self.register_hooks(self.build_hooks())

    def resume_or_load(self, resume=True):
        checkpoint = self.checkpointer.resume_or_load(self.cfg.MODEL.WEIGHTS, resume=resume)
        if resume and self.checkpointer.has_checkpoint():
            self.start_iter = checkpoint.get("iteration", -1) + 1


def test_a_checkpoint_of_a_loop_of_ones_own_says_how_many_iterations_it_has(tmp_path):
    for max_iter in (5, 7):
        trainer = WithoutTrainerState(tiny_cfg(tmp_path, "SOLVER.MAX_ITER", max_iter))
        trainer.resume_or_load(resume=True)
        assert trainer.start_iter == (0 if max_iter == 5 else 5)
        trainer.train()
        saved = torch.load(tmp_path / "model_final.pth")
        assert (saved["iteration"], saved["scheduler"]["last_epoch"]) == (max_iter - 1, max_iter)
    assert [iter for _, iter in trainer.storage.history("total_loss").values()] == [5, 6]


def test_an_evaluation_of_the_last_iteration_in_a_loop_of_ones_own_is_made_once():
    class Own(TrainerBase):
        def run_step(self):
            pass

    calls = []
    trainer = Own()
    trainer.register_hooks([hooks.EvalHook(2, lambda: calls.append(trainer.last_done_iter))])
    hook = trainer._hooks[0]
    trainer.register_hooks([hooks.CallbackHook(after_step=lambda trainer: trainer.iter == 3 and hook.act_now())])
    trainer.max_iter = 4
    with EventStorage() as trainer.storage:
        trainer.before_train()
        for trainer.iter in range(4):
            trainer.before_step()
            trainer.run_step()
            trainer.after_step()
        trainer.after_train()
    assert calls == [1, 3]


def test_a_loop_of_ones_own_runs_hooks_on_both_sides_of_the_save_point(tmp_path):
    class Own(TrainerBase):
        def run_step(self):
            self.storage.put_scalar("square", self.iter**2)

    calls = []
    trainer = Own()
    trainer.register_hooks(
        [
            hooks.CallbackHook(after_step=lambda trainer: calls.append(("above", trainer.iter))),
            hooks.PeriodicWriter([JSONWriter(str(tmp_path / "metrics.json"))], period=2),
        ]
    )
    trainer.register_hooks(
        [hooks.CallbackHook(after_step=lambda trainer: calls.append(("below", trainer.iter)))], priority=60
    )
    trainer.max_iter = 4
    with EventStorage() as trainer.storage:
        trainer.before_train()
        for trainer.iter in range(4):
            trainer.before_step()
            trainer.run_step()
            trainer.after_step()
        trainer.after_train()
    assert calls == [(side, iter) for iter in range(4) for side in ("above", "below")]
    assert trainer.status == "finished"
    assert len((tmp_path / "metrics.json").read_text().splitlines()) == 2


def test_a_loop_of_ones_own_that_runs_again_keeps_the_storage_that_it_opens():
    trainer = TrainerBase()
    trainer.register_hooks(
        [hooks.CallbackHook(after_step=lambda trainer: trainer.storage.put_scalar("a", trainer.iter))]
    )
    trainer.max_iter = 2
    for _ in range(2):
        with EventStorage() as opened:
            trainer.storage = opened
            trainer.before_train()
            for trainer.iter in range(2):
                trainer.before_step()
                trainer.after_step()
            trainer.after_train()
        assert trainer.storage is opened
        assert opened.history("a").values() == [(0.0, 0), (1.0, 1)]


def test_an_error_of_the_worker_ends_a_loop_of_ones_own_at_most_20_iterations_later():
    def fail():
        raise OSError("no space left")

    def loop():
        with EventStorage() as trainer.storage:
            defer(trainer.storage)
            trainer.before_train()
            for trainer.iter in range(60):
                trainer.before_step()
                if trainer.iter == 3:
                    trainer.storage.publish(fail)
                trainer.after_step()

    trainer = TrainerBase()
    trainer.max_iter = 60
    with pytest.raises(OSError, match="no space left"):
        loop()
    assert 3 < trainer.iter <= 23


def test_a_failure_in_a_loop_of_ones_own_is_one_for_the_hooks(tmp_path):
    seen = []
    trainer = TrainerBase()
    trainer.register_hooks([hooks.CallbackHook(after_train=lambda trainer: seen.append(trainer.status))])

    def loop():
        with EventStorage() as trainer.storage:
            try:
                trainer.before_train()
                trainer.before_step()
                trainer.run_step()
            finally:
                trainer.after_train()

    with pytest.raises(NotImplementedError):
        loop()
    assert seen == ["failed"]


@pytest.mark.parametrize("options", [[], ["SOLVER.NESTEROV", True], ["SOLVER.MOMENTUM", 0.0]])
def test_parameters_that_are_unfrozen_in_the_run_train_as_with_torchs_own_choice(tmp_path, options):
    def trained(folder, *more):
        torch.manual_seed(3)
        trainer = DefaultTrainer(tiny_cfg(folder, *options, *more))
        frozen = [*trainer.model.parameters()][:2]
        before = weights(trainer.model)
        for parameter in frozen:
            parameter.requires_grad = False

        def unfreeze(trainer):
            if trainer.iter == 4:
                assert equal(before[:2], weights(trainer.model)[:2])
                for parameter in frozen:
                    parameter.requires_grad = True

        trainer.register_hooks([hooks.CallbackHook(before_step=unfreeze)])
        trainer.train()
        assert not any(map(torch.equal, before, weights(trainer.model)))
        return trainer

    fused = trained(tmp_path / "fused")
    assert fused.optimizer.defaults["fused"]
    plain = trained(tmp_path / "plain", "SOLVER.OPTIMIZER.FUSED", False)
    for ours, theirs in zip(weights(fused.model), weights(plain.model), strict=True):
        torch.testing.assert_close(ours, theirs)


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
    def run(trainer_class, folder, max_iter, resume=False):
        torch.manual_seed(4 if resume else 3)
        trainer = trainer_class(tiny_cfg(folder, "SOLVER.MAX_ITER", max_iter))
        trainer.resume_or_load(resume=resume)
        calls = []
        trainer.register_hooks([hooks.CallbackHook(after_step=lambda trainer: calls.append(trainer.iter))])
        trainer.train()
        return trainer, calls

    default, _ = run(DefaultTrainer, tmp_path / "default", 10)
    walking, calls = run(WalksOverHooks, tmp_path / "walking", 10)
    assert calls == [*range(10)]
    assert [*scalars(walking)["mine"]] == [(float(i), i) for i in range(10)]
    for name in ("classification/top1", "total_loss"):
        assert walking.storage.history(name).values() == default.storage.history(name).values()
    run(WalksOverHooks, tmp_path / "parts", 5)
    resumed, calls = run(WalksOverHooks, tmp_path / "parts", 10, resume=True)
    assert calls[-5:] == [*range(5, 10)]
    assert equal(weights(default.model), weights(walking.model))
    assert equal(weights(default.model), weights(resumed.model))


# ---------------------------------------------------------------------- results


class AdelaiLike(DefaultTrainer):
    def train(self):
        assert not hasattr(self, "_last_eval_results")
        super().train()
        assert hasattr(self, "_last_eval_results"), "No evaluation results obtained during training!"
        return self._last_eval_results


def test_results_of_the_last_evaluation_are_where_detectron2_has_them(tmp_path):
    trainer = AdelaiLike(tiny_cfg(tmp_path))
    results = trainer.train()
    assert results["classification"]["top1"] == trainer.storage.history("classification/top1").latest()


# ---------------------------------------------------------------------- hooks by index


class EditsHooks(DefaultTrainer):
    """Takes the list of ``build_hooks`` for one to edit by index."""

    def build_hooks(self):
        built = super().build_hooks()
        for i, hook in enumerate(built):
            if isinstance(hook, hooks.PeriodicCheckpointer):
                built[i] = hooks.PeriodicCheckpointer(self.checkpointer, 3, max_to_keep=2)
        evaluation = next(i for i, hook in enumerate(built) if isinstance(hook, hooks.EvalHook))
        built[evaluation] = hooks.EvalHook(4, lambda: {"answer": 42.0})
        built.insert(
            -1, hooks.CallbackHook(after_step=lambda trainer: trainer.storage.put_scalar("late", trainer.iter))
        )
        return built


def test_a_list_of_hooks_that_is_edited_by_index_is_the_list_that_runs(tmp_path):
    def run(folder, max_iter, seed=3):
        torch.manual_seed(seed)
        trainer = EditsHooks(tiny_cfg(folder, "SOLVER.MAX_ITER", max_iter))
        trainer.resume_or_load(resume=True)
        trainer.train()
        return trainer

    whole = run(tmp_path / "whole", 10)
    assert [iter for _, iter in whole.storage.history("answer").values()] == [3, 7, 10]
    assert [iter for _, iter in whole.storage.history("late").values()] == [*range(10)]
    files = {path.name for path in (tmp_path / "whole").glob("model_*.pth")}
    assert files == {"model_0000005.pth", "model_0000008.pth", "model_final.pth"}

    run(tmp_path / "parts", 6)
    assert equal(weights(whole.model), weights(run(tmp_path / "parts", 10, seed=4).model))


class ReadsResults(hooks.HookBase):
    def __init__(self):
        self.seen = []

    def after_step(self):
        self.seen.append("classification/top1" in self.trainer.storage.histories())


@pytest.mark.parametrize("priority", ["NORMAL", "LOW"])
def test_a_hook_after_the_evaluation_in_the_list_is_warned_about_unless_it_runs_there(tmp_path, priority, caplog):
    class Reads(ReadsResults):
        pass

    Reads.priority = priority

    class Trainer(DefaultTrainer):
        def build_hooks(self):
            built = super().build_hooks()
            built.insert(-1, Reads())
            return built

    trainer = Trainer(tiny_cfg(tmp_path))
    told = [message for message in caplog.messages if message.startswith("Reads stands after EvalHook in the list")]
    trainer.train()
    [hook] = [hook for hook in trainer.hooks if isinstance(hook, Reads)]
    assert (hook.seen[4], hook.seen[5], len(told)) == (priority == "LOW", True, priority == "NORMAL")


def test_a_hook_that_is_taken_out_of_the_list_of_a_trainer_does_not_run(tmp_path):
    trainer = DefaultTrainer(tiny_cfg(tmp_path))
    evaluation = next(i for i, hook in enumerate(trainer._hooks) if isinstance(hook, hooks.EvalHook))
    trainer._hooks.pop(evaluation)
    trainer.train()
    assert not hasattr(trainer, "_last_eval_results")


def test_a_checkpoint_without_results_leaves_none_of_the_run_before(tmp_path):
    trainer = DefaultTrainer(tiny_cfg(tmp_path))
    before = trainer.state_dict()
    trainer.train()
    assert hasattr(trainer, "_last_eval_results")
    trainer.load_state_dict(before)
    assert not hasattr(trainer, "_last_eval_results")
