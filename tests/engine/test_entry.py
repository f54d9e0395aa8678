"""A training script in one call: its command, what it shows in the terminal, and what only its log has."""

import re
from argparse import Namespace

import pytest
import torch

from tests.docs.pages import contents
from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep
from trainkit.config import get_cfg
from trainkit.engine import DefaultTrainer, HookBase, default_argument_parser, run


def run_with(cfg, *arguments, trainer_class=DefaultTrainer):
    return run(default_argument_parser().parse_args(arguments), trainer_class, cfg)


def end_of(log):
    """The lines of the summary; one that was broken, for a long folder, is whole."""
    found = re.search(r"(?<=: )The run (was|has) .*(\n  .*)*", log.read_text())[0]
    whole = found.replace("\n      ", " ")
    return [line.strip() for line in whole.splitlines()]


def test_the_file_and_the_settings_of_the_command_are_merged_into_a_copy(tmp_path):
    (tmp_path / "job.yaml").write_text("SOLVER: {BASE_LR: 0.25, MAX_ITER: 4}\n")
    cfg = tiny_cfg(tmp_path / "run")
    before = cfg.clone()
    results = run_with(cfg, "--config-file", str(tmp_path / "job.yaml"), "SOLVER.MAX_ITER", "3")
    assert "classification" in results
    assert cfg == before
    used = get_cfg()
    used.merge_from_file(tmp_path / "run/config.yaml")
    before.merge_from_list(["SOLVER.BASE_LR", 0.25, "SOLVER.MAX_ITER", 3])
    assert used == before


def test_a_finished_run_is_evaluated_without_a_trace_and_resumed_where_it_was(tmp_path, capsys):
    cfg = tiny_cfg(tmp_path / "run")
    run_with(cfg, "--quiet")
    assert capsys.readouterr().out == ""  # warnings and errors alone
    before = contents(tmp_path / "run")
    assert run_with(cfg, "--eval-only")["classification"]["top1"] > 50
    assert contents(tmp_path / "run") == before
    run_with(cfg, "--resume", "SOLVER.MAX_ITER", "12")
    assert "Training starts after 10 of 12 iterations" in (tmp_path / "run/log.txt").read_text()


def with_hook(hook):
    """A trainer that builds one hook more."""
    return type(
        "Trainer",
        (DefaultTrainer,),
        {"build_hooks": lambda self: [hook, *DefaultTrainer.build_hooks(self)]},
    )


class Cows(HookBase):
    def summary(self):
        return "42 cows were seen"


def test_a_finished_run_shows_its_evaluations_what_was_best_where_the_time_went_and_what_there_is(
    tmp_path, capsys
):
    cfg = tiny_cfg(
        tmp_path, "LOG.WRITERS", ["console"], "CHECKPOINT.BEST_METRIC", "classification/top1"
    )
    run_with(cfg, trainer_class=with_hook(Cows()))
    terminal, log = capsys.readouterr().out, (tmp_path / "log.txt").read_text()
    assert terminal.count("Evaluated after 5 of 10 iterations  classification/top1: ") == 1
    # the final evaluation alone is a table
    assert terminal.count("Total inference time") == terminal.count("Evaluation results") == 1
    assert log.count("Total inference time") == log.count("Evaluation results") == 2
    assert terminal.index("Total inference time") > terminal.index("after 10/10  ")
    for text in ("(torch uses ", "TinyClassifier(\n"):  # the environment and the model
        assert text not in terminal
        assert text in log

    end, time, cows, best, files = end_of(tmp_path / "log.txt")
    assert "finished after 10 of 10 iterations" in end
    assert " s per step, " in time
    assert cows == "42 cows were seen"
    assert re.fullmatch(r"best classification/top1 .*: model_best.pth", best)
    assert (tmp_path / "model_0000004.pth").exists()  # there may be hundreds of them
    names = "config.yaml, log.txt, model_best.pth, model_final.pth"
    assert files == f"files in {tmp_path}: {names}"


def test_a_run_that_has_not_finished_says_how_it_goes_on_and_one_that_has_finished_early_says_why(
    tmp_path,
):
    stop = AfterStep(lambda trainer: trainer.iter == 2 and trainer.request_stop("enough"))
    run_with(tiny_cfg(tmp_path / "stopped"), trainer_class=with_hook(stop))
    with pytest.raises(ZeroDivisionError):
        run_with(
            tiny_cfg(tmp_path / "failed"), trainer_class=with_hook(AfterStep(lambda trainer: 1 / 0))
        )
    first, *_, last = end_of(tmp_path / "stopped" / "log.txt")
    assert "stopped after 3 of 10 iterations" in first
    assert "--resume" in last
    assert "trainer.train()" in last
    first, *_, last = end_of(tmp_path / "failed" / "log.txt")
    assert "failed after 1 of 10 iterations" in first
    assert last.startswith("files in ")  # there is no checkpoint to go on from
    early = [
        "EARLY_STOPPING.METRIC",
        "classification/top1",
        "EARLY_STOPPING.THRESHOLD",
        1.0,
        "TEST.EVAL_PERIOD",
        3,
    ]
    run_with(tiny_cfg(tmp_path / "early", *early))
    end = "The run has finished after 3 of 10 iterations, early: classification/top1 is "
    assert end_of(tmp_path / "early" / "log.txt")[0].startswith(end)


def test_options_for_several_processes_are_refused_if_nothing_starts_them(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_with(tiny_cfg(tmp_path / "run"), "--num-gpus", "2")
    message = capsys.readouterr().err
    assert "2 processes" in message
    assert "launch(main, " in message
    assert not (tmp_path / "run").exists()


def test_options_of_a_parser_without_processes_are_enough(tmp_path):
    args = Namespace(config_file="", opts=[], eval_only=False, resume=False)
    assert "classification" in run(args, DefaultTrainer, tiny_cfg(tmp_path))


def test_an_evaluation_without_a_dataset_is_refused(tmp_path, capsys):
    cfg = tiny_cfg(tmp_path / "run")
    run_with(cfg)
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run_with(cfg, "--eval-only", "DATASETS.TEST", "[]")
    assert caught.value.code != 0
    assert "DATASETS.TEST is empty" in capsys.readouterr().err


def test_weights_of_another_model_are_not_evaluated(tmp_path, capsys):
    """The layers that fit are loaded, and the others would be random."""

    class Deeper(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            model = super().build_model(cfg)
            model.more = torch.nn.Linear(2, 2)
            return model

    cfg = tiny_cfg(tmp_path / "run")
    run_with(cfg)
    weights = ["MODEL.WEIGHTS", str(tmp_path / "run/model_final.pth")]
    assert run_with(cfg, "--eval-only", *weights)["classification"]["top1"] > 50
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run_with(cfg, "--eval-only", *weights, trainer_class=Deeper)
    assert caught.value.code != 0
    message = capsys.readouterr().err
    assert "2 weights of the model" in message
    assert "more.bias, more.weight" in message


def test_a_job_that_started_from_weights_says_which_model_it_evaluates(tmp_path, capsys):
    """MODEL.WEIGHTS of the config are those from which the run started."""
    start = tmp_path / "start.pth"
    model = DefaultTrainer.build_model(tiny_cfg(tmp_path))
    with torch.no_grad():
        for parameter in [*model.parameters()][-2:]:  # the last layer
            parameter.zero_()  # it says class 0 for all samples: one class is right
    torch.save(model.state_dict(), start)
    cfg = tiny_cfg(tmp_path / "run", "MODEL.WEIGHTS", str(start))
    trained = run_with(cfg)

    assert run_with(cfg, "--eval-only")["classification"]["mean_class_accuracy"] == 50
    assert "not the run in" in capsys.readouterr().out
    assert run_with(cfg, "--eval-only", "--resume") == trained
    assert trained["classification"]["mean_class_accuracy"] > 50
    final = str(tmp_path / "run/model_final.pth")
    assert run_with(cfg, "--eval-only", "MODEL.WEIGHTS", final) == trained
    assert "not the run in" not in capsys.readouterr().out
