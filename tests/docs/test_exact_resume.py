"""The GAN of the page resumes exactly, and the check of the page finds what differs, but for readings of a clock."""

import pytest
import torch

from tests.docs.pages import blocks, run
from tools.inspect_checkpoint import compare_files, parts_of
from trainkit.checkpoint.file import read_file
from trainkit.engine.hooks import CallbackHook

(GAN,) = blocks("docs/exact_resume.md", "python")


@pytest.mark.parametrize("left_out", ["", "rng", "data", "optimizers"])
def test_a_gan_with_two_optimizers_resumes_exactly_and_the_check_names_what_was_not_resumed(tmp_path, left_out):
    page = run(GAN, "docs/exact_resume.md")

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
    if not left_out:
        assert page["train"](tmp_path / "pieces", 40).start_iter == 20
    else:
        trainer, checkpointer = page["build"](tmp_path / "pieces")
        fresh = trainer.state_dict()
        forget = CallbackHook(after_load=lambda trainer, state: state["trainer"].update({left_out: fresh[left_out]}))
        trainer.register_hooks([forget])
        checkpointer.resume_or_load("")
        trainer.train(trainer.iter + 1, 40)

    files = [str(tmp_path / name / "model_final.pth") for name in ("whole", "pieces")]
    text, differs = compare_files(*files)
    assert differs == bool(left_out)
    num_entries = len(parts_of(read_file(files[0])))
    said = f"identical: {num_entries} entries, bit by bit, except clock readings"
    assert text.startswith("model/") if left_out else text == said
