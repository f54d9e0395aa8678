"""The GAN of the page resumes exactly, and the check of the page finds what differs, but for readings of a clock."""

import pytest
import torch

from tests.docs.pages import blocks, run
from tools.inspect_checkpoint import compare_files, parts_of
from trainkit.checkpoint.file import read_file
from trainkit.engine.hooks import CallbackHook

(GAN,) = blocks("docs/exact_resume.md", "python")


@pytest.fixture
def page():
    return run(GAN, "docs/exact_resume.md")


def compare(folder, **options):
    """The final checkpoints of a run in one piece and of one in pieces."""
    return compare_files(*(str(folder / name / "model_final.pth") for name in ("whole", "pieces")), **options)


def test_a_gan_with_two_optimizers_resumes_exactly(page, tmp_path):
    def kill(trainer):
        if trainer.iter == 24:
            raise SystemExit

    torch.manual_seed(1)
    page["train"](tmp_path / "whole", 40)
    torch.manual_seed(1)
    trainer, _ = page["build"](tmp_path / "pieces")
    trainer.register_hooks([CallbackHook(after_step=kill)])
    with pytest.raises(SystemExit):
        trainer.train(0, 40)
    torch.manual_seed(2)
    assert page["train"](tmp_path / "pieces", 40).start_iter == 20

    state = read_file(tmp_path / "whole/model_final.pth")
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
    forget = CallbackHook(after_load=lambda trainer, state: state["trainer"].update({left_out: fresh[left_out]}))
    trainer.register_hooks([forget])
    checkpointer.resume_or_load("")
    trainer.train(trainer.iter + 1, 40)

    text, differs = compare(tmp_path)
    assert differs
    assert text.startswith("model/")
