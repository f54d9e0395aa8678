"""Every point of a hook, with its arguments, in the whole life of a run: trained, evaluated, saved, loaded, tested."""

import functools
import itertools

import numpy as np
import pytest
import torch

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Weight, sgd
from tests.utils.png import decode_png
from trainkit.engine import DefaultTrainer, EvaluationRun, HookBase, SimpleTrainer
from trainkit.engine.hook_base import EPOCH_POINTS, HOOK_POINTS
from trainkit.engine.hooks import HOOK_REGISTRY, VISUALIZER_REGISTRY, CallbackHook


class Recorder(HookBase):
    """One line for every call: iteration, point, arguments. Of data the sizes are noted, of dicts the keys."""

    def __init__(self):
        self.lines = []

    def take(self):
        """The lines since the last time."""
        lines, self.lines = self.lines, []
        return lines

    def _note(self, *words):
        self.lines.append(" ".join(map(str, [self.trainer.iter, *words])))


def _recording(point):
    def note(self, *arguments):
        self._note(point, *map(_short, arguments))

    return note


def _short(argument):
    if isinstance(argument, torch.Tensor):
        return f"outputs{list(argument.shape)}"
    if isinstance(argument, dict):
        return f"inputs[{len(argument['x'])}]" if "x" in argument else "+".join(sorted(argument))
    return argument


for _point in HOOK_POINTS:
    setattr(Recorder, _point, _recording(_point))


@VISUALIZER_REGISTRY.register()
def draw_predictions(inputs, outputs):
    """A row of pixels, one per sample: white for class 1, black for class 0."""
    image = np.zeros((1, len(outputs), 3), np.uint8)
    image[0, outputs.argmax(dim=1).numpy() == 1] = 255
    return image


def lines(text):
    return [line.strip() for line in text.strip().splitlines()]


# 2 epochs of 2 iterations; 12 and 10 samples are evaluated in batches of at most 6
JOB = ("SOLVER.IMS_PER_BATCH", 20, "SOLVER.MAX_ITER", 4, "SOLVER.CHECKPOINT_PERIOD", 2, "TEST.EVAL_PERIOD", 2)
JOB += ("SOLVER.STEPS", (3,), "DATASETS.VAL", ("tiny_val",), "TEST.IMS_PER_BATCH", 6)

FIRST_EPOCH = lines(
    """
    0 before_train
    0 before_epoch
    0 before_step
    0 after_backward
    0 after_step
    1 before_step
    1 after_backward
    1 after_step
    1 before_save iteration+model+trainer
    1 before_eval val tiny_val
    1 before_eval_step val 0 inputs[6]
    1 after_eval_step val 0 inputs[6] outputs[6, 2]
    1 before_eval_step val 1 inputs[6]
    1 after_eval_step val 1 inputs[6] outputs[6, 2]
    1 after_eval val tiny_val classification
    1 after_epoch
    """
)
SECOND_EPOCH_BEGINS = lines(
    """
    2 before_epoch
    2 before_step
    2 after_backward
    2 after_step
    """
)
SECOND_EPOCH_ENDS = lines(
    """
    3 before_step
    3 after_backward
    3 after_step
    3 before_save iteration+model+trainer
    3 after_epoch
    4 before_eval val tiny_val
    4 before_eval_step val 0 inputs[6]
    4 after_eval_step val 0 inputs[6] outputs[6, 2]
    4 before_eval_step val 1 inputs[6]
    4 after_eval_step val 1 inputs[6] outputs[6, 2]
    4 after_eval val tiny_val classification
    4 before_eval test tiny_test
    4 before_eval_step test 0 inputs[6]
    4 after_eval_step test 0 inputs[6] outputs[6, 2]
    4 before_eval_step test 1 inputs[4]
    4 after_eval_step test 1 inputs[4] outputs[4, 2]
    4 after_eval test tiny_test classification
    4 after_train
    """
)
WHOLE_RUN = FIRST_EPOCH + SECOND_EPOCH_BEGINS + SECOND_EPOCH_ENDS


def default_trainer(output_dir, *options, trainer_class=DefaultTrainer):
    """A trainer, and a recorder that stands before the checkpointer and the evaluations."""
    trainer = trainer_class(tiny_cfg(output_dir, *JOB, *options))
    recorder = record(trainer)
    return trainer, recorder


def record(trainer):
    recorder = Recorder()
    trainer.register_hooks([recorder], before="PeriodicCheckpointer")
    return recorder


# ---------------------------------------------------------------------- training


@HOOK_REGISTRY.register()
class EndOfRun(HookBase):
    """Notes what has been evaluated when its ``after_train`` comes."""

    def __init__(self):
        self.evaluated, self.at_the_end = [], None

    def after_eval(self, phase, name, results):
        self.evaluated.append((phase, self.trainer.iter))

    def after_train(self):
        self.at_the_end = list(self.evaluated)


PLACES = [{}, {"priority": "LOWEST"}, {"before": "EvalHook"}, {"after": "FinalEvalHook"}]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_after_train_of_a_users_hook_comes_after_the_final_validation_and_test(place, tmp_path):
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *JOB))
    trainer.register_hooks([EndOfRun()], **place)
    trainer.train()
    [hook] = (hook for hook in trainer.hooks if isinstance(hook, EndOfRun))
    assert hook.at_the_end == [("val", 1), ("val", 4), ("test", 4)]
    assert [iter for _, iter in trainer.storage.history("test/classification/top1").values()] == [trainer.max_iter]


def test_a_run_from_its_beginning_to_its_end(tmp_path):
    trainer, recorder = default_trainer(tmp_path)

    trainer.resume_or_load()  # there is nothing to load
    assert recorder.take() == []
    trainer.train()

    assert recorder.take() == WHOLE_RUN


def test_a_run_that_ends_inside_an_epoch_and_is_resumed_by_another_trainer(tmp_path):
    first, recorder = default_trainer(tmp_path)
    first.train(max_iter=3)
    at_the_end = [line.replace("4 ", "3 ", 1) for line in WHOLE_RUN[WHOLE_RUN.index("4 before_eval val tiny_val") :]]
    saved = "2 before_save iteration+model+trainer"
    assert recorder.take() == [*FIRST_EPOCH, *SECOND_EPOCH_BEGINS, saved, *at_the_end]

    second, recorder = default_trainer(tmp_path)
    second.resume_or_load()
    assert recorder.take() == ["0 after_load iteration+model+trainer"]  # nothing is loaded yet
    second.train()
    assert recorder.take() == ["3 before_train", *SECOND_EPOCH_ENDS]  # the epoch is not started again


def test_a_run_that_is_resumed_between_two_epochs(tmp_path):
    default_trainer(tmp_path)[0].train(max_iter=2)
    second, recorder = default_trainer(tmp_path)

    second.resume_or_load()
    second.train()

    loaded = ["0 after_load iteration+model+trainer", "2 before_train"]
    # the checkpoint was written before the evaluation of its iteration and before the end of the epoch
    left = FIRST_EPOCH[FIRST_EPOCH.index("1 before_eval val tiny_val") :]
    assert recorder.take() == loaded + left + SECOND_EPOCH_BEGINS + SECOND_EPOCH_ENDS


def test_a_run_that_fails_has_its_after_train_and_no_evaluation_behind_it(tmp_path):
    def fail(trainer):
        raise OSError("today")

    trainer, recorder = default_trainer(tmp_path)
    trainer.register_hooks([CallbackHook(after_epoch=fail)], priority="LOW")
    with pytest.raises(OSError, match="today"):
        trainer.train()

    assert recorder.take() == [*FIRST_EPOCH, "1 after_failure today", "1 after_train"]


# ---------------------------------------------------------------------- test only


def test_a_run_that_only_tests_and_draws(tmp_path):
    expected = default_trainer(tmp_path)[0].train()
    entry = {"NAME": "VisualizationHook", "DRAW": "draw_predictions", "PERIOD": 2}
    run = EvaluationRun(tiny_cfg(tmp_path, *JOB, "HOOKS", [entry]), DefaultTrainer)
    recorder, outputs = Recorder(), []
    keep = CallbackHook(after_eval_step=lambda trainer, phase, index, inputs, found: outputs.append(found))
    run.register_hooks([recorder, keep])

    results = run.run()

    assert recorder.take() == lines(
        """
        0 after_load iteration+model+trainer
        4 before_eval test tiny_test
        4 before_eval_step test 0 inputs[6]
        4 after_eval_step test 0 inputs[6] outputs[6, 2]
        4 before_eval_step test 1 inputs[4]
        4 after_eval_step test 1 inputs[4] outputs[4, 2]
        4 after_eval test tiny_test classification
        """
    )
    assert results == expected
    [picture] = tmp_path.rglob("*.png")
    assert str(picture.relative_to(tmp_path)) == "visualization/test/tiny_test_iter0000004_batch0001.png"
    assert np.array_equal(decode_png(picture.read_bytes()), draw_predictions(None, outputs[1]))
    assert not np.array_equal(decode_png(picture.read_bytes()), draw_predictions(None, outputs[0]))


# ---------------------------------------------------------------------- who is called


def test_a_hook_is_not_called_where_it_overrides_nothing(tmp_path, monkeypatch):
    class After(HookBase):
        count = 0

        def after_eval_step(self, phase, index, inputs, outputs):
            self.count += 1

    class Inheriting(After):
        pass

    # a call of the base class would now be seen
    base_calls = []
    for point in HOOK_POINTS:
        noting = functools.wraps(getattr(HookBase, point))
        call = noting(lambda self, *_, point=point: base_calls.append((type(self), point)))
        monkeypatch.setattr(HookBase, point, call)
    trainer, _ = default_trainer(tmp_path)
    hooks = [After(), Inheriting()]
    trainer.register_hooks([HookBase(), *hooks])
    trainer.train()
    default_trainer(tmp_path)[0].resume_or_load()

    assert base_calls == []
    assert [hook.count for hook in hooks] == [6, 6]


class Overriding:
    """Notes every call of a point of the trainer, and passes it on to the hooks."""

    def __init__(self, *args):
        self.points = []
        super().__init__(*args)


class OverridingDefaultTrainer(Overriding, DefaultTrainer):
    pass


class OverridingEvaluationRun(Overriding, EvaluationRun):
    pass


def _overriding(point):
    def call(self, *arguments):
        self.points.append(point)
        getattr(super(Overriding, self), point)(*arguments)

    return call


for _point in HOOK_POINTS:
    setattr(Overriding, _point, _overriding(_point))


def points_of(recorded):
    return [line.split()[1] for line in recorded]


def test_points_that_a_trainer_class_overrides_are_called_with_those_of_its_hooks(tmp_path):
    trainer, recorder = default_trainer(tmp_path, trainer_class=OverridingDefaultTrainer)
    trainer.train()
    trainer.resume_or_load()
    recorded = points_of(recorder.take())
    assert recorded == [*points_of(WHOLE_RUN), "after_load"]
    # the method of the trainer is around the final evaluation, which hooks do in it
    at_the_end = WHOLE_RUN.index("4 before_eval val tiny_val")
    assert trainer.points == [*recorded[:at_the_end], "after_train", *recorded[at_the_end:-2], "after_load"]
    assert set(recorded) == set(HOOK_POINTS) - {"after_failure"}

    run = OverridingEvaluationRun(tiny_cfg(tmp_path, *JOB), DefaultTrainer)
    run.run()
    steps = ["before_eval_step", "after_eval_step"]
    assert run.points == ["after_load", "before_eval", *steps, *steps, "after_eval"]


# ---------------------------------------------------------------------- epochs


def stream_trainer(*hooks):
    """A trainer on data without a length."""
    model = Weight()
    trainer = SimpleTrainer(model, itertools.repeat(torch.ones(())), sgd(model))
    trainer.register_hooks(hooks)
    return trainer


@pytest.mark.parametrize("point", EPOCH_POINTS)
def test_a_hook_that_wants_epochs_is_refused_by_a_stream_before_training(point):
    seen = []
    wants = CallbackHook(**{point: lambda trainer: seen.append(point)})
    trainer = stream_trainer(wants, CallbackHook(before_train=lambda trainer: seen.append("before_train")))

    with pytest.raises(ValueError, match="CallbackHook uses epochs, but the training data has no length.* iterations"):
        trainer.train(0, 2)
    assert (seen, trainer.status) == ([], "not started")


def test_an_epoch_that_the_end_of_the_run_cuts_short_has_no_end():
    calls = []
    model = Weight()
    trainer = SimpleTrainer(model, [torch.ones(())] * 3, sgd(model))
    note = {
        point: lambda trainer, point=point: calls.append((point, trainer.iter, trainer.epoch)) for point in EPOCH_POINTS
    }
    trainer.register_hooks([CallbackHook(**note)])

    trainer.train(0, 5)
    trainer.train(5, 7)

    assert calls == [
        ("before_epoch", 0, 0),
        ("after_epoch", 2, 0),
        ("before_epoch", 3, 1),
        ("after_epoch", 5, 1),
        ("before_epoch", 6, 2),
    ]
