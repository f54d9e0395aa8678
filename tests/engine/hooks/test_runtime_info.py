import pytest

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, Steps, batches, sgd
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import RuntimeInfo
from trainkit.engine.step import SimpleTrainer


def described(caplog):
    return [message for message in caplog.messages if message.startswith("This run")]


def trained(*hooks):
    model = Regression()
    model.linear.bias.requires_grad = False
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.register_hooks(hooks)
    trainer.train(1, 5)
    return trainer


def test_the_epoch_is_stored_as_it_is():
    storage = trained(RuntimeInfo()).storage
    assert storage.history("epoch").values() == [(0.0, 1), (1.0, 2), (1.0, 3), (2.0, 4)]
    assert storage.smoothing_hints()["epoch"] is False
    assert "epoch" not in trained().storage.latest()


def test_the_epoch_is_stored_every_period_and_at_the_end():
    assert trained(RuntimeInfo(period=3)).storage.history("epoch").values() == [(1.0, 2), (2.0, 4)]
    with pytest.raises(ValueError, match="period must be a whole number of iterations >= 1, got 0"):
        RuntimeInfo(0)


def test_the_log_says_what_is_known_of_the_run(caplog):
    caplog.set_level("INFO")
    trained(RuntimeInfo())
    assert described(caplog) == ["This run: 5 iterations = 2.5 epochs of 2; world size 1; 3 of 4 parameters trained"]


def test_without_epochs_and_a_model_there_is_less_to_say(caplog):
    caplog.set_level("INFO")
    trainer = Steps([RuntimeInfo()])
    trainer.train(0, 3)
    assert described(caplog) == ["This run: 3 iterations; world size 1"]
    assert trainer.storage.latest() == {}


@pytest.mark.parametrize(("seed", "said"), [(1, "seed 1"), (-1, "seed drawn at random")])
def test_a_config_tells_the_samples_and_the_seed(caplog, tmp_path, seed, said):
    caplog.set_level("INFO")
    options = ("HOOKS", [{"NAME": "RuntimeInfo"}], "SOLVER.ACCUMULATION_STEPS", 2, "SEED", seed)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options))
    trainer.train(0, 1)
    assert described(caplog) == [
        "This run: 1 iterations = 0.4 epochs of 2.5; world size 1; 16 samples per iteration; "
        f"{said}; 74 of 74 parameters trained"
    ]
