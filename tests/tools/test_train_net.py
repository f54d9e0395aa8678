"""The training scripts, as a user calls them."""

import json

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from projects.digits import DigitsCNN, DigitsTransform, load_split
from tests.docs.pages import contents
from tests.tools.digits_run import in_one_piece, in_pieces
from tools import plain_train_net, train_net
from trainkit.checkpoint.format import make_format
from trainkit.engine import default_argument_parser


def run(tool, output_dir, *arguments):
    return tool.main(
        default_argument_parser().parse_args([*map(str, arguments), "OUTPUT_DIR", str(output_dir)])
    )


def losses(output_dir):
    rows = [json.loads(line) for line in (output_dir / "metrics.json").read_text().splitlines()]
    return {row["iteration"]: row["total_loss"] for row in rows if "total_loss" in row}


SHORT = (
    *(
        "SOLVER.MAX_ITER",
        20,
        "SOLVER.WARMUP_ITERS",
        3,
        "SOLVER.CHECKPOINT_PERIOD",
        10,
        "TEST.EVAL_PERIOD",
        10,
    ),
    *("LOG.PERIOD", 1, "LOG.WINDOW", 1, "LOG.WRITERS", "['json']"),
)


def test_trainer_and_plain_loop_give_the_same_losses_and_weights_bit_for_bit(tmp_path, capsys):
    # the plain loop evaluates the test data only
    options = (*SHORT, "DATASETS.VAL", "()")
    results = run(train_net, tmp_path / "trainer", "--resume", *options)
    assert "No checkpoint to resume from" in (tmp_path / "trainer/log.txt").read_text()
    plain_results = run(plain_train_net, tmp_path / "plain", *options)
    run(plain_train_net, tmp_path / "other", *options, "SEED", 1)
    assert len(losses(tmp_path / "plain")) == 20
    assert losses(tmp_path / "trainer") == losses(tmp_path / "plain")
    assert losses(tmp_path / "other") != losses(tmp_path / "plain")
    one, two = (
        torch.load(tmp_path / name / "model_final.pth")["model"] for name in ("trainer", "plain")
    )
    assert all(torch.equal(one[key], two[key]) for key in one)

    assert run(plain_train_net, tmp_path / "plain", "--eval-only", *options) == plain_results
    before = contents(tmp_path / "trainer")
    assert run(train_net, tmp_path / "trainer", "--eval-only", *options) == results
    weights = ("MODEL.WEIGHTS", tmp_path / "trainer/model_0000009.pth")
    assert run(train_net, tmp_path / "trainer", "--eval-only", *options, *weights) != results
    assert contents(tmp_path / "trainer") == before
    with pytest.raises(SystemExit):
        run(plain_train_net, tmp_path / "plain", "--resume", *options)
    assert "--resume is given, but the plain loop cannot resume" in capsys.readouterr().err


@pytest.mark.parametrize("tool", [train_net, plain_train_net])
def test_the_trial_run_goes_through_every_part(tmp_path, tool):
    run(tool, tmp_path, "--fast-dev-run")
    trial = tmp_path / "fast_dev_run"
    assert {"model_0000002.pth", "model_final.pth", "metrics.json", "config.yaml"} <= {
        p.name for p in trial.iterdir()
    }
    assert not (tmp_path / "metrics.json").exists()


# one of each part that reads settings; its own tests have the others
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SOLVER.MAX_ITR", 3], "SOLVER.MAX_ITER"),
        (["--eval-only"], "MODEL.WEIGHTS"),
        (["--config-file", "no/such.yaml"], "no/such.yaml"),
        (["MODEL.NAME", "DigitsCNM"], "DigitsCNN"),
        (["DATASETS.TRAIN", "['digits_trian']"], "digits_train"),
        (["TEST.EVALUATORS", "['ClassificationEvaluatr']"], "ClassificationEvaluator"),
        (["HOOKS", [{"NAME": "EMAHok"}]], "EMAHook"),
        (["SOLVER.OPTIMIZER.BETA", 0.9], "beta=0.9"),
        (["SOLVER.OPTIMIZER.NAME", "AdamW"], "SOLVER.NESTEROV"),  # digits sets it
    ],
)
def test_a_mistake_on_the_command_line_ends_with_one_message_and_code_2(
    tmp_path, capsys, arguments, message
):
    with pytest.raises(SystemExit) as caught:
        run(train_net, tmp_path / "run", *arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert message in error
    metrics = tmp_path / "run/metrics.json"
    assert not metrics.exists() or metrics.read_text() == ""  # nothing has been trained


@pytest.mark.slow
def test_the_keys_of_evaluations_and_checkpoints_survive_two_calls_of_train_and_a_resume(tmp_path):
    loss = "loss/total_loss"
    small = [
        "DATALOADER.SAMPLER_TRAIN",
        "RandomSubsetTrainingSampler",
        "DATALOADER.RANDOM_SUBSET_RATIO",
        0.1,
    ]
    small += ["SOLVER.IMS_PER_BATCH", 40, "TEST.EVALUATORS", ["LossEvaluator"]]
    options = ["TEST.EVAL_PERIOD", "1ep", "TEST.EVAL_AT_START", True, "TEST.MAX_BATCHES", 1]
    options += ["TEST.EXPECTED_RESULTS", [["loss", "total_loss", 2, 2]]]
    options += [
        "CHECKPOINT.BEST_METRIC",
        loss,
        "CHECKPOINT.BEST_TO_KEEP",
        2,
        "CHECKPOINT.BEST_MODE",
        "max",
    ]
    options += [
        "EARLY_STOPPING.METRIC",
        loss,
        "EARLY_STOPPING.MODE",
        "max",
        "EARLY_STOPPING.PATIENCE",
        2,
    ]
    options += ["LOG.WRITERS", ["console", "json", "tensorboard"], "CHECKPOINT.PUBLISH", "model"]
    options += [
        "CHECKPOINT.PUBLISH_FORMAT",
        "safetensors",
        "CHECKPOINT.MAX_TO_KEEP",
        1,
        "CHECKPOINT.START",
        1,
    ]
    run = in_pieces(tmp_path, *small, *options)

    # at the start, in each epoch, at the end of a call and at the stop
    assert [*run.metric(loss)] == [
        0,
        2,
        4,
        5,
        8,
    ]
    weights = run.checkpoint()["model"]
    model = DigitsCNN(width=2).eval()
    model.load_state_dict(weights)
    batch = default_collate([DigitsTransform()(sample) for sample in load_split("val")[:100]])
    with torch.no_grad():
        expected = F.cross_entropy(model(batch), batch["label"], label_smoothing=0.1).item()
    assert run.metric(loss)[8] == pytest.approx(expected, rel=1e-5)
    for text in (
        "Results agree with TEST.EXPECTED_RESULTS",
        f"{loss} has not been better",
        "  total_loss: ",
    ):
        assert text in run.log
    # the newest numbered file, and the ends of the two shorter runs
    for text, number in (("model_best_0", 2), ("model_0", 3), ("events.out.tfevents", 3)):
        assert len([name for name in run.files if text in name]) == number
    published = [
        make_format("safetensors").read(file)["model"]
        for file in tmp_path.glob("model_final_published-*")
    ]
    assert any(
        all(torch.equal(value, weights[key]) for key, value in written.items())
        for written in published
    )
    plain = in_one_piece(tmp_path / "plain", *small)
    assert [*plain.metric(loss)] == [3, 7, 12]
    assert [name for name in plain.files if "published" in name or "events" in name] == []
