"""The settings on docs/asked_for.md do what its rows say."""

import re
import shlex

import pytest
import torch

from tests.docs.pages import page
from tests.tools.digits_run import OPTIONS, Run, in_one_piece, in_pieces
from tools import train_net
from trainkit.config import check_values, get_cfg
from trainkit.engine import default_argument_parser
from trainkit.utils.logger import close_logger

DONE, NOT_DONE = (
    re.findall(r"^\| (.+?) \| (\[.+?\)) \| (.+) \|$", text, re.MULTILINE)
    for text in page("docs/asked_for.md").split("## What trainkit does not do")
)
REPOSITORIES = {
    "detectron2": "facebookresearch/detectron2",
    "lightning": "Lightning-AI/pytorch-lightning",
    "transformers": "huggingface/transformers",
    "accelerate": "huggingface/accelerate",
    "trl": "huggingface/trl",
}
ELSEWHERE = {
    "the same order of data after a resume in a later epoch": (
        "tests/tools/test_resume.py::test_a_run_that_sigterm_has_stopped_goes_on_as_if_nothing_had_happened"
    ),
    "loaders with a state": "tests/data/test_loader.py::test_a_stream_with_a_state_takes_part_without_workers",
    "a resume that does not read all earlier batches again": (
        "tests/data/test_loader.py::test_a_state_counts_the_samples_of_all_ranks"
    ),
    "a checkpoint on Ctrl-C, and when SLURM ends the job": (
        "tests/tools/test_stopping.py::test_ctrl_c_ends_the_process_behind_the_step_with_its_code_and_a_checkpoint"
    ),
    "a kill during a save leaves a usable checkpoint": (
        "tests/checkpoint/test_disk.py::test_wherever_a_save_is_killed_the_old_or_the_new_checkpoint_is_intact"
    ),
    "another number of GPUs after a resume": (
        "projects/logical_ranks/tests/test_same_bits_on_any_processes.py::"
        "test_a_run_that_is_killed_goes_on_with_2_then_1_then_4_processes_to_the_same_bytes"
    ),
    "continue if a loss is NaN, and find the sample": (
        "projects/non_finite/tests/test_non_finite.py::test_a_skipped_update_leaves_weights_and_optimizer_as_they_were"
    ),
    "gradient accumulation": "tests/engine/test_trainers.py::test_accumulation_equals_one_batch_of_all_samples",
    "a GAN, which updates two models in turn": (
        "tests/docs/test_exact_resume.py::test_a_gan_with_two_optimizers_resumes_exactly"
    ),
}


def train(folder, *settings):
    words = [*OPTIONS, "OUTPUT_DIR", folder, *settings]
    train_net.main(default_argument_parser().parse_args([*map(str, words)]))
    close_logger()
    return Run(folder)


def first_layer(run, name="model_final"):
    return run.checkpoint(name)["model"]["layers.0.weight"]


def check_resume(folder, *settings):
    assert settings == ("--resume",)  # in_pieces stops twice in the middle of an epoch, then it gives this option
    whole, resumed = in_one_piece(folder / "whole"), in_pieces(folder / "pieces")
    assert torch.equal(first_layer(whole), first_layer(resumed))
    assert whole.metric("total_loss") == resumed.metric("total_loss")


def check_workers(folder, *settings):
    augment = ("INPUT.TRAIN_TRANSFORM", "DigitsTrainTransform", "SOLVER.MAX_ITER", 4)
    with_workers, without = train(folder / "with", *augment, *settings), train(folder / "without", *augment)
    assert with_workers.metric("total_loss") == without.metric("total_loss")


def check_longer(folder, *settings):
    assert max(train(folder).metric("total_loss")) == 11
    assert [*train(folder, *settings).metric("total_loss")] == [*range(16)]


def check_lengths(folder, *settings):
    run = train(folder, *settings)
    assert (max(run.metric("total_loss")), [*run.metric("classification/top1")][:2]) in ((6, [2, 5]), (5, [2, 6]))


def check_validation_loss(folder, *settings):
    of_the_config = ("CHECKPOINT.BEST_METRIC", "classification/top1")  # the evaluator of the row does not give it
    assert [*train(folder, *of_the_config, *settings).metric("loss/total_loss")] == [2, 5, 8, 12]


def check_early_stopping(folder, *settings):
    assert max(train(folder, *settings, "SOLVER.BASE_LR", 0).metric("total_loss")) == 8  # 3 evaluations, none is better


def check_best(folder, *settings):
    assert "model_best.pth" in train(folder, *settings).files


def check_average(folder, *settings):
    assert "EMAHook" in train(folder, *settings).hooks_at("after_step")


def check_freeze(folder, *settings):
    initial, frozen = train(folder / "initial", "SOLVER.BASE_LR", 0), train(folder / "frozen", *settings)
    assert torch.equal(first_layer(frozen, "model_0000003"), first_layer(initial))
    assert not torch.equal(first_layer(frozen), first_layer(initial))


def check_optimizers(folder, *settings):
    state = train(folder, *settings).checkpoint()["trainer"]["_trainer"]["optimizer"]
    assert all(f"'{kept}': tensor" in str(state) for kept in ("exp_avg", "momentum_buffer"))


def check_skip(folder, *settings):
    whole, less = (train(folder / name, *more).metric("total_loss") for name, more in (("a", ()), ("b", settings)))
    assert [iter for iter in range(6) if whole[iter] == less[iter]] == [0, 1, 2]


CHECKS = {
    "resume in the middle of an epoch": check_resume,
    "the same results with any number of workers": check_workers,
    "train a finished run for longer": check_longer,
    "train by iterations": check_lengths,
    "train by epochs": check_lengths,
    "the loss on the validation data": check_validation_loss,
    "early stopping; patience that counts evaluations": check_early_stopping,
    "keep the best checkpoint": check_best,
    "averaged weights (EMA)": check_average,
    "freeze a part of the model, and unfreeze it later": check_freeze,
    "several optimizers, each for a part of the parameters": check_optimizers,
    "leave out the batches of some steps": check_skip,
}


def settings_of(answer):
    """The first ones in a cell, as words of the command line."""
    return shlex.split(next(iter(re.findall(r"`(--\w[^`]*|[A-Z_.]+ [^`]+)`", answer)), ""))


def test_each_row_has_a_test_a_real_repository_and_settings_that_are_accepted():
    assert NOT_DONE
    assert {name for name, *_ in DONE} == {*CHECKS, *ELSEWHERE}
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in page(file), test
    for _, threads, answer in [*DONE, *NOT_DONE]:
        for library, number, link in re.findall(r"\[(\w+)#(\d+)\]\((.+?)\)", threads):
            assert re.fullmatch(rf"https://github.com/{REPOSITORIES[library]}/(issues|pull)/{number}", link)
        cfg = get_cfg()
        cfg.merge_from_file(train_net.DEFAULT_CONFIG)
        cfg.SOLVER.WARMUP_ITERS = 0  # as in the command of the page
        cfg.merge_from_list(default_argument_parser().parse_args(settings_of(answer)).opts)
        check_values(cfg)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_settings_do_what_the_row_says(tmp_path, name):
    (answer,) = [answer for row, _, answer in DONE if row == name]
    CHECKS[name](tmp_path, *settings_of(answer))
