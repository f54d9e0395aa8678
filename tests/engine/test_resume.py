"""A run goes on where its checkpoint stood: the hook points, the states, the random numbers."""

import logging
import shlex

import pytest
import torch

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Regression, Steps, batches, sgd, through_a_file
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.config import ConfigError
from trainkit.data.build import build_batch_data_loader
from trainkit.data.samplers import TrainingSampler
from trainkit.engine import DefaultTrainer, hooks
from trainkit.engine.step import SimpleTrainer


class Epochs(Steps):
    iters_per_epoch = 2


def job(calls, max_iter=None, state=None, *, stop_at=None):
    """A run that notes its calls and the random numbers of its steps, and resumes from a state."""
    trainer = Epochs(step=lambda iter: calls.append(("run_step", iter, torch.rand(()).item())))
    points = (
        "before_train",
        "before_epoch",
        "before_step",
        "after_step",
        "after_epoch",
        "after_train",
    )
    notes = {
        point: lambda trainer, point=point: calls.append((point, trainer.iter)) for point in points
    }
    trainer.register_hooks([hooks.CallbackHook(**notes)])
    if stop_at is not None:
        point, iter = stop_at
        stop = hooks.CallbackHook(
            **{point: lambda trainer: trainer.iter == iter and trainer.request_stop("enough")}
        )
        trainer.register_hooks([stop])
    if state is not None:
        trainer.load_state_dict(state)
    trainer.train(trainer.next_iter, max_iter)
    return trainer


def test_a_checkpointer_of_the_trainer_saves_what_is_asked_for_by_name_once(tmp_path, caplog):
    model = Regression()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.checkpointer = Checkpointer(model, tmp_path, trainer=trainer)
    written = []
    asks = hooks.CallbackHook(
        before_step=lambda trainer: trainer.iter == 1 and trainer.request_save("mine")
    )
    twice = [
        AfterStep(
            lambda t: t.request_save("twice", lambda: written.append((t.done, t.boundary_done)))
        )
        for _ in range(2)
    ]
    at_the_end = hooks.CallbackHook(
        after_train=lambda t: t.request_save("end", lambda: written.append("at once"))
    )
    (tmp_path / "full.pth").mkdir()  # nothing can be renamed to that
    trainer.register_hooks(
        [asks, *twice, at_the_end, AfterStep(lambda trainer: trainer.request_save("full"))]
    )
    trainer.train(0, 3)
    assert written == [(1, 0), (2, 1), (3, 2), "at once"]
    saved = torch.load(tmp_path / "mine.pth", weights_only=True)
    assert "ranks" not in saved
    assert saved["iteration"] == 1
    assert saved["trainer"]["iteration"] == 1
    assert saved["trainer"]["boundary"] == {"is_over": False, "passed": []}
    failed = [text for text in caplog.messages if "'full' is not saved" in text]
    assert len(failed) == 3
    assert all("cannot write" in text for text in failed)
    other = sgd(model, momentum=0.5)
    trainer = SimpleTrainer(model, batches(2), other)
    trainer.load_state_dict(
        {**saved["trainer"], "optimizer": sgd(model, momentum=0.9).state_dict()}
    )
    assert other.param_groups[0]["momentum"] == 0.9  # of the checkpoint


def test_a_hook_that_saves_itself_is_warned_about_once_and_its_file_goes_on_with_the_next_iteration(
    tmp_path, caplog
):
    def make(folder):
        model = Regression()
        trainer = SimpleTrainer(model, batches(8), sgd(model))
        trainer.checkpointer = Checkpointer(model, folder, trainer=trainer)
        return trainer

    whole = make("")
    whole.train(0, 6)
    trainer = make(tmp_path)
    trainer.register_hooks(
        [AfterStep(lambda trainer: trainer.checkpointer.save(f"own_{trainer.iter}"))]
    )
    trainer.train(0, 4)
    assert caplog.text.count("a run resumed from it is not exact") == 1
    assert "trainer.request_save(name)" in caplog.text

    resumed = make("")
    resumed.data_loader = batches(8)[4:]
    resumed.checkpointer.load(str(tmp_path / "own_3.pth"))
    assert resumed.done - 1 == 3  # the weights have the update of iteration 3
    resumed.train(4, 6)
    assert torch.equal(resumed.model.linear.weight, whole.model.linear.weight)


@pytest.mark.parametrize("name", ["batch", "losses", "outputs"])
def test_below_the_save_point_what_belongs_to_the_step_is_gone_in_every_run(name):
    model = Regression()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    read = []
    trainer.register_hooks([AfterStep(lambda trainer: read.append(getattr(trainer, name)))])
    assert not hasattr(trainer, name)
    trainer.register_hooks([AfterStep(lambda trainer: getattr(trainer, name))], priority="LOW")
    with pytest.raises(
        AttributeError,
        match=rf"trainer.{name} is there in after_backward.*register the hook with a",
    ):
        trainer.train(0, 2)
    assert len(read) == 1


@pytest.mark.parametrize("stop_at", [2, 3])  # inside an epoch and at its end
def test_a_run_that_is_stopped_before_it_has_done_anything_stands_where_it_stood(stop_at):
    whole, calls = [], []
    job(whole, 6)
    state = job([], 6, stop_at=("after_step", stop_at)).state_dict()
    for _ in range(2):
        trainer = job(calls, 6, state, stop_at=("before_train", stop_at + 1))
        assert trainer.status == "stopped"
        assert trainer.iter == stop_at + 1
        state = trainer.state_dict()
    assert calls == 2 * [("before_train", stop_at + 1), ("after_train", stop_at + 1)]
    resumed = []
    job(resumed, 6, state)
    assert [call[:2] for call in resumed[1:]] == [call[:2] for call in whole[1 - len(resumed) :]]
    assert resumed[1][0] == ("before_step" if stop_at == 2 else "before_epoch")


def test_what_a_loader_cannot_give_back_is_named_at_the_start_of_a_run_that_saves(caplog, tmp_path):
    model = Regression()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.train(0, 1)
    assert "may differ" not in caplog.text
    trainer.register_hooks(
        [hooks.PeriodicCheckpointer(Checkpointer(model, tmp_path, trainer=trainer), 5)]
    )
    trainer.train(1, 2)
    assert "A resumed run may differ from one that is never stopped: " in caplog.text
    assert "state_dict" in caplog.text


def test_the_random_state_of_another_number_of_processes_is_derived_from_the_checkpoint(caplog):
    caplog.set_level("INFO")
    state = job([], 3).state_dict()

    def drawn(world_size):
        calls = []
        job(calls, 5, {**state, "world_size": world_size})
        return [call[2] for call in calls if call[0] == "run_step"]

    as_saved, derived = drawn(1), drawn(2)
    assert derived == drawn(2) != as_saved == drawn(1)
    assert "The checkpoint is of 2 ranks, now there are 1" in caplog.text


def test_what_the_optimizer_takes_from_a_checkpoint_is_a_table_and_another_kind_of_optimizer_an_error(
    caplog,
):
    def trainer(make=sgd, **kwargs):
        model = Regression()
        return SimpleTrainer(model, batches(2), make(model, **kwargs))

    state = trainer(lr=0.1).state_dict()
    resumed = trainer(lr=0.2, weight_decay=0.0, foreach=True)
    resumed.load_state_dict({**state, "data": {"position": 3}})
    data, first, *_, row = "\n".join(caplog.messages[-2:]).splitlines()
    assert data.startswith("The data start again: ")
    assert "(list) has no state_dict()" in data
    assert "values of the checkpoint" in first
    assert row.split() == ["0", "lr", "0.2", "0.1"]
    loader = build_batch_data_loader([0], TrainingSampler(1, seed=0), 1)
    SimpleTrainer(resumed.model, loader, sgd(resumed.model, lr=0.1)).load_state_dict(state)
    assert caplog.messages[-1].startswith("The data start again: ")
    assert "position" in caplog.messages[-1]
    assert resumed.optimizer.param_groups[0]["lr"] == 0.1
    assert resumed.optimizer.param_groups[0]["foreach"] is True

    with pytest.raises(CheckpointError, match="has the state of SGD, the optimizer .* is Adam"):
        trainer(lambda model: torch.optim.Adam(model.parameters())).load_state_dict(state)
    [group] = state["optimizer"]["param_groups"]
    adam = {name: group[name] for name in group if name != "nesterov"} | {"betas": 0}
    for groups, message in (
        (
            [group] * 2,
            r"sizes of the checkpoint's parameter groups are \[2, 2\], those of this run \[2\]",
        ),
        ([adam], r"\['betas'\], this one \['nest"),
    ):
        of_detectron2 = {**state["optimizer"], "param_groups": groups}
        without_names = {**state, "optimizer": of_detectron2, "optimizer_groups": []}
        with pytest.raises(CheckpointError, match=message):
            trainer().load_state_dict(without_names)


def epochs_job(folder, *options):
    """40 samples; with the sizes of the batches that are trained."""
    cfg = tiny_cfg(
        folder, "SOLVER.STEPS", (), "SOLVER.WARMUP_ITERS", 0, "TEST.EVAL_PERIOD", 0, *options
    )
    trainer = DefaultTrainer(cfg)
    drawn = []
    note = hooks.CallbackHook(
        after_backward=lambda trainer: drawn.append(len(trainer.batch["label"]))
    )
    trainer.register_hooks([note])
    trainer.resume_or_load()
    return trainer, drawn


@pytest.mark.parametrize(
    ("batch", "per_epoch", "max_iter"),
    [
        (16, "2.5", 15),
        (4, "10", 30),
        (20, "2", 14),
        (12, "3.33333", 17),  # 6.67 iterations for the samples that are left
    ],
)
def test_another_batch_size_is_refused_with_the_length_that_trains_the_epochs_that_are_left(
    batch, per_epoch, max_iter, tmp_path
):
    """4 epochs of 40 samples; 2 are trained as 10 batches of 8, so 80 samples are left."""
    for saved in (True, False):  # at the end of a run of 2 epochs, or stopped in one of 4
        folder = tmp_path / str(saved)
        trainer, drawn = epochs_job(folder, "SOLVER.MAX_ITER", "2ep" if saved else "4ep")
        trainer.train(max_iter=10)
        if not saved:
            (folder / "finished").unlink()
        with pytest.raises(ConfigError) as error:
            epochs_job(folder, "SOLVER.MAX_ITER", "4ep", "SOLVER.IMS_PER_BATCH", batch)
        assert f"an epoch has {per_epoch} iterations now, and had 5" in str(error.value)
        assert "2 epochs are done" in str(error.value)
        assert f"set SOLVER.MAX_ITER {max_iter};" in str(error.value)
        resumed, after = epochs_job(
            folder, "SOLVER.MAX_ITER", max_iter, "SOLVER.IMS_PER_BATCH", batch
        )
        resumed.train()
        assert resumed.iter == max_iter
        assert sum(drawn) == 80
        assert abs(sum(after) - 80) <= batch / 2  # 80 samples, to the nearest batch


def test_every_length_in_epochs_is_named_and_those_in_iterations_go_on(tmp_path, caplog):
    more = ("LOG.PERIOD", "1ep", "SOLVER.STEPS", ("1ep", "3ep"), "CHECKPOINT.START", "0.5ep")
    entry = {"NAME": "Freeze", "NAMES": "layers.0.*", "END": "1ep"}
    trainer, _ = epochs_job(tmp_path, "SOLVER.MAX_ITER", "4ep", *more)
    trainer.train(max_iter=10)
    with pytest.raises(ConfigError) as error:
        epochs_job(
            tmp_path, "SOLVER.MAX_ITER", "4ep", *more, "HOOKS", [entry], "SOLVER.IMS_PER_BATCH", 20
        )
    # past lengths keep their iterations: 1 epoch was 5, 0.5 were 2; then 2 iterations are an epoch
    remedy = str(error.value).partition(", set ")[2]
    options = shlex.split(remedy.partition(" and give ")[0])
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "SOLVER.MAX_ITER": "14",
        "CHECKPOINT.START": "2",
        "LOG.PERIOD": "2",
        "SOLVER.STEPS": "(5, 12)",
    }
    assert "HOOKS in iterations" in remedy
    caplog.clear()
    epochs_job(tmp_path, "SOLVER.MAX_ITER", 14, "SOLVER.IMS_PER_BATCH", 20)
    rows = caplog.text.partition("The training data are not those of the checkpoint:\n")[2]
    assert [line.split("  ")[0] for line in rows.splitlines()[:4]] == [
        "data",
        "-" * len("samples per iteration"),
        "samples per iteration",
        "iterations per epoch",
    ]


def test_another_number_of_samples_is_a_row_that_says_what_happens(tmp_path, caplog):
    def make(size):
        model = Regression()
        samples = [*batches(size, 1)]
        loader = build_batch_data_loader(
            samples, TrainingSampler(size, seed=3), 1, collate_fn=lambda x: x[0]
        )
        return SimpleTrainer(model, loader, sgd(model))

    trainer = make(6)
    trainer.train(0, 4)
    same = make(6)
    same.load_state_dict(trainer.state_dict())
    assert "not those of the checkpoint" not in caplog.text
    longer = make(8)
    longer.load_state_dict(through_a_file(trainer.state_dict()))
    table = caplog.text.partition("not those of the checkpoint:\n")[2].splitlines()
    assert [row.split()[:5] for row in table[2:4]] == [
        ["samples", "per", "epoch", "8", "6"],
        ["iterations", "per", "epoch", "8", "6"],
    ]
    assert "some samples come twice and some are left out" in table[2]
    # a loader that tells nothing is compared by its length
    model = Regression()
    plain = SimpleTrainer(model, batches(5), sgd(model))
    caplog.clear()
    SimpleTrainer(model, batches(7), plain.optimizer).load_state_dict(plain.state_dict())
    assert caplog.text.splitlines()[-1].split()[:5] == ["iterations", "per", "epoch", "7", "5"]


@pytest.mark.parametrize("setting", [0, 2])
def test_a_resumed_run_has_the_threads_of_its_checkpoint_or_names_the_difference(
    tmp_path, setting, caplog
):
    caplog.set_level(logging.INFO)
    former = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 2)).train()
        torch.set_num_threads(2)
        keys = ("SOLVER.MAX_ITER", 4, "NUM_THREADS", setting)
        trainer = DefaultTrainer(tiny_cfg(tmp_path, *keys))
        trainer.resume_or_load(resume=True)
        threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(former)
    if setting == 0:
        assert threads == 3
        assert "3 threads, as in the checkpoint; here it had 2" in caplog.text
    else:
        assert threads == 2
        assert "torch uses 2 threads; in the checkpoint's run it used 3" in caplog.text
