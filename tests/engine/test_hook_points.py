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
from trainkit.engine.hooks import VISUALIZER_REGISTRY, CallbackHook


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


class Overriding:
    """A trainer that notes every call of a point, and passes it on to the hooks."""

    def __init__(self, *args):
        self.points = []
        super().__init__(*args)


def _overriding(point):
    def call(self, *arguments):
        self.points.append(point)
        getattr(super(Overriding, self), point)(*arguments)

    return call


for _point in HOOK_POINTS:
    setattr(Recorder, _point, _recording(_point))
    setattr(Overriding, _point, _overriding(_point))


@VISUALIZER_REGISTRY.register()
def draw_predictions(inputs, outputs):
    """A row of pixels, one per sample: white for class 1, black for class 0."""
    white = (outputs.argmax(dim=1) == 1).numpy()
    return 255 * np.repeat(white[None, :, None], 3, axis=2).astype(np.uint8)


# 2 epochs of 2 iterations; 12 and 10 samples are evaluated in batches of at most 6
JOB = (
    "SOLVER.IMS_PER_BATCH",
    20,
    "SOLVER.MAX_ITER",
    4,
    "SOLVER.CHECKPOINT_PERIOD",
    2,
    "TEST.EVAL_PERIOD",
    2,
)
JOB += ("SOLVER.STEPS", (3,), "DATASETS.VAL", ("tiny_val",), "TEST.IMS_PER_BATCH", 6)

SAVED = "before_save iteration+model+trainer"


def step(iter):
    return [f"{iter} {point}" for point in ("before_step", "after_backward", "after_step")]


def evaluation(iter, phase, *sizes):
    batches = [
        line
        for index, size in enumerate(sizes)
        for line in (
            f"{iter} before_eval_step {phase} {index} inputs[{size}]",
            f"{iter} after_eval_step {phase} {index} inputs[{size}] outputs[{size}, 2]",
        )
    ]
    name = f"{phase} tiny_{phase}"
    return [f"{iter} before_eval {name}", *batches, f"{iter} after_eval {name} classification"]


OF_FIRST = evaluation(1, "val", 6, 6)
FIRST_EPOCH = [
    "0 before_train",
    "0 before_epoch",
    *step(0),
    *step(1),
    f"1 {SAVED}",
    *OF_FIRST,
    "1 after_epoch",
]
SECOND_EPOCH_BEGINS = ["2 before_epoch", *step(2)]
AT_THE_END = [*evaluation(4, "val", 6, 6), *evaluation(4, "test", 6, 4), "4 after_train"]
SECOND_EPOCH_ENDS = [*step(3), f"3 {SAVED}", "3 after_epoch", *AT_THE_END]
WHOLE_RUN = FIRST_EPOCH + SECOND_EPOCH_BEGINS + SECOND_EPOCH_ENDS


def default_trainer(output_dir, *options, trainer_class=DefaultTrainer):
    """A trainer, and a recorder that stands before the checkpointer and the evaluations."""
    trainer, recorder = trainer_class(tiny_cfg(output_dir, *JOB, *options)), Recorder()
    trainer.register_hooks([recorder], before="PeriodicCheckpointer")
    return trainer, recorder


@pytest.mark.parametrize("place", [{}, {"before": "EvalHook"}, {"after": "FinalEvalHook"}], ids=str)
def test_after_train_of_a_users_hook_comes_after_the_final_validation_and_test(place, tmp_path):
    evaluated, at_the_end = [], []
    hook = CallbackHook(
        after_eval=lambda trainer, phase, name, results: evaluated.append((phase, trainer.iter)),
        after_train=lambda trainer: at_the_end.extend(evaluated),
    )
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *JOB))
    trainer.register_hooks([hook], **place)
    trainer.train()
    assert at_the_end == [("val", 1), ("val", 4), ("test", 4)]
    assert [iter for _, iter in trainer.storage.history("test/classification/top1").values()] == [
        trainer.max_iter
    ]


@pytest.mark.parametrize("max_iter", [2, 3])
def test_a_run_that_is_resumed_between_two_epochs_or_inside_one(max_iter, tmp_path):
    first, recorder = default_trainer(tmp_path)
    first.train(max_iter=max_iter)
    before = FIRST_EPOCH
    if max_iter == 3:
        before = [*FIRST_EPOCH, *SECOND_EPOCH_BEGINS, f"2 {SAVED}"]
        assert recorder.take() == [*before, *(line.replace("4 ", "3 ", 1) for line in AT_THE_END)]
    second, recorder = default_trainer(tmp_path)
    second.resume_or_load()
    assert recorder.take() == ["0 after_load iteration+model+trainer"]  # nothing is loaded yet
    second.train()
    # the checkpoint was written before the evaluation of its iteration and before the end of the epoch
    left = [*OF_FIRST, "1 after_epoch", *SECOND_EPOCH_BEGINS]
    assert recorder.take() == [
        f"{max_iter} before_train",
        f"{max_iter} {SAVED}",  # the end of the shorter run, under its number
        *(left if max_iter == 2 else []),
        *SECOND_EPOCH_ENDS,
    ]


def test_a_run_that_fails_has_its_after_train_and_no_evaluation_behind_it(tmp_path):
    def fail(trainer):
        raise OSError("today")

    trainer, recorder = default_trainer(tmp_path)
    trainer.register_hooks([CallbackHook(after_epoch=fail)], priority="LOW")
    with pytest.raises(OSError, match="today"):
        trainer.train()
    assert recorder.take() == [*FIRST_EPOCH, "1 after_failure today", "1 after_train"]


def test_a_run_that_only_tests_and_draws(tmp_path):
    expected = default_trainer(tmp_path)[0].train()
    entry = {"NAME": "VisualizationHook", "DRAW": "draw_predictions", "PERIOD": 2}
    run = EvaluationRun(tiny_cfg(tmp_path, *JOB, "HOOKS", [entry]), DefaultTrainer)
    recorder, outputs = Recorder(), []
    keep = CallbackHook(
        after_eval_step=lambda trainer, phase, index, inputs, found: outputs.append(found)
    )
    run.register_hooks([recorder, keep])
    results = run.run()
    assert recorder.take() == ["0 after_load iteration+model+trainer", *evaluation(4, "test", 6, 4)]
    assert results == expected
    [picture] = tmp_path.rglob("*.png")
    assert (
        str(picture.relative_to(tmp_path))
        == "visualization/test/tiny_test_iter0000004_batch0001.png"
    )
    assert np.array_equal(decode_png(picture.read_bytes()), draw_predictions(None, outputs[1]))
    assert not np.array_equal(decode_png(picture.read_bytes()), draw_predictions(None, outputs[0]))


def test_a_run_calls_the_points_of_its_hooks_and_those_of_its_trainer_class(tmp_path, monkeypatch):
    base_calls = []
    for point in HOOK_POINTS:  # a call of the base class would be seen
        noting = functools.wraps(getattr(HookBase, point))
        call = noting(lambda self, *_, point=point: base_calls.append((type(self), point)))
        monkeypatch.setattr(HookBase, point, call)
    trainer, recorder = default_trainer(
        tmp_path, trainer_class=type("Trainer", (Overriding, DefaultTrainer), {})
    )
    trainer.register_hooks([HookBase(), CallbackHook(after_eval_step=lambda *_: None)])
    trainer.train()
    trainer.resume_or_load()
    found = recorder.take()
    assert found == [*WHOLE_RUN, "4 after_load iteration+model+trainer"]
    recorded = [line.split()[1] for line in found]
    # the method of the trainer is around the final evaluation, which hooks do in it
    at_the_end = len(WHOLE_RUN) - len(AT_THE_END)
    assert trainer.points == [
        *recorded[:at_the_end],
        "after_train",
        *recorded[at_the_end:-2],
        "after_load",
    ]
    assert set(recorded) == set(HOOK_POINTS) - {"after_failure"}
    assert base_calls == []

    run = type("Run", (Overriding, EvaluationRun), {})(tiny_cfg(tmp_path, *JOB), DefaultTrainer)
    run.run()
    steps = ["before_eval_step", "after_eval_step"]
    assert run.points == ["after_load", "before_eval", *steps, *steps, "after_eval"]


@pytest.mark.parametrize("point", EPOCH_POINTS)
def test_a_stream_has_no_epochs_and_a_hook_that_wants_them_is_refused_before_training(point):
    model, seen = Weight(), []
    trainer = SimpleTrainer(model, itertools.repeat(torch.ones(())), sgd(model))
    with pytest.raises(ValueError, match="has no length"):
        _ = trainer.iters_per_epoch
    with pytest.raises(ValueError, match="use iterations"):
        _ = trainer.epoch
    trainer.train(0, 2)
    wants = {name: lambda trainer: seen.append(trainer.iter) for name in (point, "before_train")}
    trainer.register_hooks([CallbackHook(**wants)])
    with pytest.raises(
        ValueError,
        match="CallbackHook uses epochs, but the training data has no length.* iterations",
    ):
        trainer.train(0, 2)
    assert seen == []
    assert trainer.status == "finished"
