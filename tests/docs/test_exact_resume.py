"""The GAN of the page resumes exactly, and its check finds what differs."""

import pytest
import torch

from tests.docs.pages import blocks, run

GAN, CHECK = blocks("docs/exact_resume.md", "python")


@pytest.fixture
def page():
    return run(CHECK, "docs/exact_resume.md", **run(GAN, "docs/exact_resume.md"))


def test_a_gan_with_two_optimizers_resumes_exactly(page, tmp_path):
    torch.manual_seed(1)
    page["train"](tmp_path / "whole", 40)

    torch.manual_seed(1)
    trainer, _ = page["build"](tmp_path / "pieces")

    def stop(trainer):  # as a kill would, between two checkpoints
        if trainer.iter == 24:
            raise SystemExit

    trainer.register_hooks([page["hooks"].CallbackHook(after_step=stop)])
    with pytest.raises(SystemExit):
        trainer.train(0, 40)
    torch.manual_seed(2)
    resumed = page["train"](tmp_path / "pieces", 40)

    assert resumed.start_iter == 20
    files = [tmp_path / name / "model_final.pth" for name in ("whole", "pieces")]
    assert page["compare"](*files) == []
    assert {"optimizers", "data", "rng", "storage"} <= torch.load(files[0])["trainer"].keys()


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

    differing = page["compare"](*[tmp_path / name / "model_final.pth" for name in ("whole", "pieces")])
    assert any(path.startswith("/model/") for path in differing)
