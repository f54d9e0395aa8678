"""The GAN of the page resumes exactly, and the check of the page finds what differs, but for readings of a clock."""

import pytest
import torch

from tests.docs.pages import blocks, run
from tests.engine.job import tiny_cfg
from tools.inspect_checkpoint import compare_files, parts_of
from trainkit.checkpoint.file import read_file
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook
from trainkit.utils.env import seed_all_rng

(GAN,) = blocks("docs/exact_resume.md", "python")


@pytest.fixture
def page():
    return run(GAN, "docs/exact_resume.md")


def stopped_at(iter):
    """A hook that ends a run as a kill would, between two checkpoints."""

    def stop(trainer):
        if trainer.iter == iter:
            raise SystemExit

    return CallbackHook(after_step=stop)


def compare(folder, **options):
    """The final checkpoints of a run in one piece and of one in pieces."""
    return compare_files(*(str(folder / name / "model_final.pth") for name in ("whole", "pieces")), **options)


def test_a_gan_with_two_optimizers_resumes_exactly(page, tmp_path):
    torch.manual_seed(1)
    page["train"](tmp_path / "whole", 40)

    torch.manual_seed(1)
    trainer, _ = page["build"](tmp_path / "pieces")
    trainer.register_hooks([stopped_at(24)])
    with pytest.raises(SystemExit):
        trainer.train(0, 40)
    torch.manual_seed(2)
    resumed = page["train"](tmp_path / "pieces", 40)

    assert resumed.start_iter == 20
    state = read_file(tmp_path / "whole/model_final.pth")
    assert {"optimizers", "data", "rng", "storage"} <= state["trainer"].keys()
    said = f"identical: {len(parts_of(state))} entries, bit by bit, except clock readings"
    assert compare(tmp_path) == (said, False)


@pytest.mark.parametrize("left_out", ["rng", "data", "optimizers"])
def test_the_check_names_what_was_not_resumed(page, tmp_path, left_out):
    torch.manual_seed(1)
    page["train"](tmp_path / "whole", 40)

    torch.manual_seed(1)
    page["train"](tmp_path / "pieces", 20)
    torch.manual_seed(2)
    trainer, checkpointer = page["build"](tmp_path / "pieces")
    fresh = trainer.state_dict()

    class Forgetful(page["hooks"].HookBase):
        def after_load(self, state):
            state["trainer"][left_out] = fresh[left_out]

    trainer.register_hooks([Forgetful()])
    checkpointer.resume_or_load("")
    trainer.train(trainer.iter + 1, 40)

    text, differs = compare(tmp_path)
    assert differs
    assert text.startswith("model/")


def test_the_check_leaves_out_the_clock_unless_all_is_compared(tmp_path):
    seed_all_rng(1)
    DefaultTrainer(tiny_cfg(tmp_path / "whole")).train()

    seed_all_rng(1)
    killed = DefaultTrainer(tiny_cfg(tmp_path / "pieces"))
    killed.register_hooks([stopped_at(6)])
    with pytest.raises(SystemExit):
        killed.train()
    seed_all_rng(2)
    resumed = DefaultTrainer(tiny_cfg(tmp_path / "pieces"))
    resumed.resume_or_load(resume=True)
    resumed.train()

    assert resumed.start_iter == 5
    text, differs = compare(tmp_path)
    assert (text.partition(":")[0], differs) == ("identical", False)

    text, differs = compare(tmp_path, show_all=True)
    *lines, _ = text.splitlines()
    assert differs
    assert {line.split("/")[3] for line in lines if "/storage/histories/" in line} >= {"time", "data_time"}


def test_only_the_clock_of_the_trainer_is_left_out(tmp_path):
    for name, value in (("whole", 0.0), ("pieces", 1.0)):
        (tmp_path / name).mkdir()
        history = {"values": torch.tensor([value])}
        state = {
            "model": {"time": torch.tensor(value)},
            "trainer": {"storage": {"histories": {"time": history, "timed": history}}},
        }
        torch.save(state, tmp_path / name / "model_final.pth")

    assert compare(tmp_path)[0].splitlines() == [
        "model/time: 1 of 1 values, by at most 1",
        "trainer/storage/histories/timed/values: 1 of 1 values, by at most 1",
        "different in 2 places",
    ]
