"""A run whose checkpoints leave out frozen parameters ends with the same bits, and notices another base."""

import pytest
import torch
from torch import nn
from trainkit.projects.hooks.publish_weights import publish_weights
from trainkit.projects.predict.run import cfg_of_run
from trainkit.projects.trainable_only.frozen import FrozenWeights

from tests.checkpoint.conftest import Counter
from tests.docs.pages import run
from tests.docs.test_recipes import LORA
from tests.engine.job import tiny_cfg
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.engine import DefaultPredictor, DefaultTrainer


def adapted(fill):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, fill)
    model[0].requires_grad_(False)
    return model


def test_frozen_parameters_are_left_out_and_come_from_the_file_and_others_are_an_error(tmp_path):
    torch.save(adapted(1).state_dict(), tmp_path / "base.pth")
    model = adapted(1)
    nn.init.constant_(model[2].weight, 5)
    Checkpointer(model, tmp_path / "run", frozen=FrozenWeights(model=model), state=Counter(3)).save(
        "model"
    )
    held = read_file(tmp_path / "run/model.pth")
    assert {name.split(".")[0] for name in held["model"]} == {"1", "2"}
    # without the version of batch norm, the file would be taken for one of before this buffer
    del held["model"]["1.num_batches_tracked"]
    missing = adapted(1).load_state_dict(held["model"], strict=False).missing_keys
    assert "1.num_batches_tracked" in missing
    model, state = adapted(7), Counter()
    with pytest.raises(
        CheckpointError, match=r"2 frozen parameters, such as '0\.(weight|bias)', differ"
    ):
        Checkpointer(
            model, tmp_path / "run", frozen=FrozenWeights(model=model), state=state
        ).resume_or_load("")
    assert model[2].weight.unique().item() == 7
    frozen = FrozenWeights(str(tmp_path / "base.pth"), model)
    assert (
        Checkpointer(model, tmp_path / "run", frozen=frozen, state=state).resume_or_load("") == {}
    )
    assert model[0].weight.unique().item() == 1
    assert model[2].weight.unique().item() == 5
    assert state.value == 3
    frozen.before_save(again := {"model": model.state_dict()})
    assert again["frozen_digests"] == held["frozen_digests"]


def test_a_job_with_lora_resumes_exactly_and_publishes_and_predicts_with_all_weights(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)

    class Trainer(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            return run(LORA, "recipes.md")["add_lora"](super().build_model(cfg), rank=2)

    options = ("CHECKPOINT.TRAINABLE_ONLY", True, "MODEL.WEIGHTS", str(tmp_path / "base.pth"))
    options = (*options, "CHECKPOINT.PUBLISH", "model")

    def train(folder, max_iter=None, seed=3):
        torch.manual_seed(seed)
        trainer = Trainer(tiny_cfg(tmp_path / folder, *options))
        trainer.resume_or_load()
        trainer.train(max_iter=max_iter)
        return trainer.model.state_dict()

    base = DefaultTrainer(tiny_cfg(tmp_path / "base")).model.state_dict()
    torch.save(base, tmp_path / "base.pth")
    whole = train("whole")
    assert torch.equal(whole["layers.4.weight"], base["layers.4.weight"])
    train("parts", 5)
    parts = train("parts", seed=4)  # the base model that it builds is another one
    final = tmp_path / "parts/model_final.pth"
    assert read_file(final)["model"].keys() < whole.keys()
    with pytest.raises(
        CheckpointError, match="leaves out 6 frozen weights, such as 'layers.0.bias'; pass `frozen`"
    ):
        publish_weights(final)
    (published,) = tmp_path.glob("whole/*published*")
    (tmp_path / "parts/config.yaml").write_text(tiny_cfg("elsewhere", *options).dump())
    cfg = cfg_of_run(str(tmp_path / "parts"))
    predicting = DefaultPredictor(cfg, Trainer.build_model).model.state_dict()
    for found in (parts, read_file(published)["model"], predicting):
        assert found.keys() == whole.keys()
        assert all(torch.equal(whole[name], found[name]) for name in whole)
    with pytest.raises(
        CheckpointError,
        match="4 frozen parameters, such as .* differ; .*or WEIGHTS of FrozenWeights",
    ):
        DefaultPredictor(tiny_cfg("elsewhere", "MODEL.WEIGHTS", str(final)), Trainer.build_model)
