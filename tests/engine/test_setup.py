"""What a training script does before it trains: arguments, output folder, log, seed, writers."""

import logging
import re
from argparse import Namespace

import numpy as np
import pytest
import torch

from tests.engine.job import tiny_cfg
from trainkit.checkpoint import CheckpointError
from trainkit.config import CfgNode, ConfigError, get_cfg
from trainkit.engine import (
    DefaultTrainer,
    default_argument_parser,
    default_setup,
    default_writers,
    user_errors_exit,
)
from trainkit.utils.events import (
    WRITER_REGISTRY,
    CommonMetricPrinter,
    EventStorage,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
)
from trainkit.utils.logger import close_logger
from trainkit.utils.run_folder import LOCK_FILE, release_folder

NEW, RESUME, EVAL = Namespace(resume=False, eval_only=False), Namespace(resume=True), Namespace(eval_only=True)


@pytest.fixture(autouse=True)
def closed_logger(tmp_path):
    yield
    close_logger()
    for folder in (tmp_path, tmp_path / "run"):
        release_folder(folder)


def cfg_for(output_dir, *options):
    cfg = get_cfg()
    cfg.merge_from_list(["OUTPUT_DIR", str(output_dir), "SEED", 3, *options])
    return cfg


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK_FILE)


# ---------------------------------------------------------------------- arguments


def test_options_may_stand_before_and_behind_the_key_value_pairs():
    args = default_argument_parser().parse_args(["--num-gpus", "2", "SOLVER.MAX_ITER", "-1", "--resume", "SEED", "5"])
    assert (args.num_gpus, args.resume, args.opts) == (2, True, ["SOLVER.MAX_ITER", "-1", "SEED", "5"])


def test_the_defaults_of_the_arguments():
    args = vars(default_argument_parser().parse_args([]))
    of_the_core = {"config_file": "", "resume": False, "eval_only": False, "print_config": False, "quiet": False}
    of_the_core |= {"num_gpus": 1, "num_machines": 1, "machine_rank": 0, "dist_url": "auto", "opts": []}
    assert {name: args[name] for name in of_the_core} == of_the_core
    assert not any(args[name] for name in args.keys() - of_the_core.keys())  # options of projects


def test_an_unknown_option_ends_with_code_2(capsys):
    with pytest.raises(SystemExit) as caught:
        default_argument_parser().parse_args(["SEED", "1", "--resum-from", "x"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --resum-from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--res"], "unrecognized arguments: --res"),
    ],
)
def test_numbers_that_cannot_be_launched_end_with_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        default_argument_parser().parse_args(arguments)
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("error", [ConfigError("MODEL.NAME is empty"), CheckpointError("no such file")])
def test_a_mistake_of_the_user_ends_with_one_line_and_code_2(error, capsys):
    with pytest.raises(SystemExit) as caught, user_errors_exit():
        raise error
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_ctrl_c_ends_with_one_line_and_code_130(capsys):
    with pytest.raises(SystemExit) as caught, user_errors_exit():
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_mistake_of_the_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), user_errors_exit():
        1 / 0  # noqa: B018


# ---------------------------------------------------------------------- default_setup


def test_setup_writes_the_whole_config_and_logs_what_differs_from_the_defaults(tmp_path):
    cfg = cfg_for(tmp_path / "run", "SOLVER.BASE_LR", 0.5, "MODEL.MY_WIDTH", 7, "MODEL.WEIGHT", "")
    default_setup(cfg, NEW)
    again = get_cfg()
    again.merge_from_file(str(tmp_path / "run/config.yaml"))
    assert again == cfg
    log = (tmp_path / "run/log.txt").read_text()
    assert "  SOLVER.BASE_LR: 0.5\n" in log
    assert "  MODEL.MY_WIDTH: 7\n" in log
    assert "WEIGHT_DECAY" not in log
    assert "MODEL.WEIGHT is used as a new key, beside MODEL.WEIGHTS" in log
    assert torch.__version__ in log


def test_setup_seeds_everything(tmp_path):
    drawn = []
    for _ in range(2):
        default_setup(cfg_for(tmp_path), NEW)
        drawn.append((torch.rand(1).item(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_seed_minus_one_draws_a_seed_and_logs_it(tmp_path):
    drawn = []
    for _ in range(2):
        default_setup(cfg_for(tmp_path, "SEED", -1), NEW)
        drawn.append(torch.rand(1).item())
    assert drawn[0] != drawn[1]
    assert "Using the random seed " in (tmp_path / "log.txt").read_text()


def test_a_new_run_moves_the_files_of_older_ones_aside(tmp_path):
    for content in ("first", "second"):
        default_setup(cfg_for(tmp_path), NEW)
        for name in (
            "metrics.json",
            "model_final.pth",
            "last_checkpoint",
            "finished",
            "events.out.tfevents.1",
            "events.cut_1",
        ):
            (tmp_path / name).write_text(content)
        (tmp_path / "model_final.shards-0a1b2c3d").mkdir()
        (tmp_path / "my_notes.txt").write_text("mine")
    default_setup(cfg_for(tmp_path), NEW)
    assert names_in(tmp_path) == ["config.yaml", "log.txt", "my_notes.txt", "previous_1", "previous_2"]
    assert (tmp_path / "previous_1/metrics.json").read_text() == "first"
    assert (tmp_path / "previous_2/metrics.json").read_text() == "second"
    assert {"model_final.pth", "model_final.shards-0a1b2c3d"} <= set(names_in(tmp_path / "previous_2"))


@pytest.mark.parametrize("args", [NEW, RESUME, EVAL])
def test_nothing_is_written_through_a_link_out_of_the_folder(tmp_path, args):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "log.txt").write_text("of somebody else")
    (folder / "model_0000004.pth").write_text("old")
    (folder / "last_checkpoint").write_text("model_0000004.pth")
    links = ["config.yaml", "log.txt", "metrics.json", "previous_1"]
    for name in links:
        (folder / name).symlink_to(outside / name)
    default_setup(cfg_for(folder), args)
    metrics = JSONWriter(folder / "metrics.json")
    with EventStorage() as storage:
        storage.put_scalar("a", 1.0)
        metrics.write()
        metrics.close()
    assert (names_in(outside), (outside / "log.txt").read_text()) == (["log.txt"], "of somebody else")
    assert sorted(path.name for path in (folder / "previous_2").iterdir() if path.is_symlink()) == links[:3]
    assert (folder / "model_0000004.pth").exists() == (args is not NEW)


@pytest.mark.parametrize("args", [RESUME, EVAL])
def test_resuming_and_evaluating_move_nothing(tmp_path, args):
    for name in ("metrics.json", "model_final.pth", "config.yaml", "last_checkpoint"):  # a damaged one is one too
        (tmp_path / name).write_text("old")
    default_setup(cfg_for(tmp_path), args)
    assert (tmp_path / "metrics.json").read_text() == "old"
    assert ((tmp_path / "config.yaml").read_text() == "old") is (args is EVAL)


@pytest.mark.parametrize(("restarts", "args", "moved"), [("0", NEW, True), ("1", NEW, False), ("1", EVAL, False)])
def test_what_torchrun_has_started_again_moves_nothing(tmp_path, monkeypatch, restarts, args, moved):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    (tmp_path / "model_final.pth").write_text("old")
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    default_setup(cfg_for(tmp_path), args)
    assert (tmp_path / "previous_1").exists() is moved
    said = "The run was restarted" in (tmp_path / "log.txt").read_text()
    assert said is (restarts == "1" and args is NEW)


@pytest.mark.parametrize("weights_of_others", [False, True])
def test_resuming_where_no_checkpoint_was_ever_written_is_a_new_run(tmp_path, weights_of_others):
    (tmp_path / "metrics.json").write_text("of a run that died early")
    if weights_of_others:
        torch.save({"weight": torch.ones(1)}, tmp_path / "pretrained.pth")
    default_setup(cfg_for(tmp_path), RESUME)
    assert not (tmp_path / "metrics.json").exists()
    assert (tmp_path / "previous_1/metrics.json").exists()


@pytest.mark.parametrize(("args", "is_named"), [(NEW, False), (RESUME, True)])
def test_resuming_where_a_run_was_moved_aside_names_the_newest_checkpoint(tmp_path, args, is_named):
    for _ in range(2):  # somebody forgets --resume twice
        (tmp_path / "last_checkpoint").write_text("model_0000004.pth")
        (tmp_path / "model_0000004.pth").write_text("old")
        default_setup(cfg_for(tmp_path), NEW)
    (tmp_path / "log.txt").unlink()
    default_setup(cfg_for(tmp_path), args)
    text = f"There is no checkpoint in {tmp_path} to resume, but in {tmp_path / 'previous_2'}"
    assert (text in (tmp_path / "log.txt").read_text()) is is_named


def test_resuming_with_a_tag_that_leads_away_moves_nothing(tmp_path):
    (tmp_path / "metrics.json").write_text("old")
    (tmp_path / "last_checkpoint").write_text("../model.pth")
    default_setup(cfg_for(tmp_path), RESUME)
    assert (tmp_path / "metrics.json").exists()


def test_weights_in_the_folder_that_a_new_run_empties_are_an_error_and_nothing_is_moved(tmp_path):
    weights = tmp_path / "model_final.pth"
    weights.write_text("precious")
    with pytest.raises(ConfigError, match="lies in OUTPUT_DIR, which a new run empties"):
        default_setup(cfg_for(tmp_path, "MODEL.WEIGHTS", str(weights)), NEW)
    assert weights.read_text() == "precious"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR '.*file/run' cannot be written, choose another: "):
        default_setup(cfg_for(tmp_path / "file/run"), NEW)


@pytest.mark.parametrize("folder", ["file/checkpoints", "/proc/self"])
def test_a_folder_for_checkpoints_that_cannot_be_written_is_named_and_nothing_is_moved(tmp_path, folder):
    (tmp_path / "file").write_text("")
    (tmp_path / "metrics.json").write_text("old")
    folder = tmp_path / folder  # the second one is absolute; it is there, but even root writes nothing into it
    with pytest.raises(ConfigError, match=f"CHECKPOINT.DIR '{folder}' cannot be written, choose another: "):
        default_setup(cfg_for(tmp_path, "CHECKPOINT.DIR", str(folder)), NEW)
    assert names_in(tmp_path) == ["file", "metrics.json"]


def test_the_folders_are_made_and_what_was_written_to_try_them_is_removed(tmp_path):
    default_setup(cfg_for(tmp_path / "run", "CHECKPOINT.DIR", str(tmp_path / "a/b")), NEW)
    assert names_in(tmp_path / "run") == ["config.yaml", "log.txt"]
    assert names_in(tmp_path / "a/b") == []


@pytest.mark.parametrize("begin", [lambda cfg: default_setup(cfg, NEW), DefaultTrainer])
def test_what_is_no_folder_is_refused_before_anything_is_made(tmp_path, monkeypatch, begin):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="^OUTPUT_DIR: got ''"):
        begin(cfg_for("run", "OUTPUT_DIR", ""))
    assert names_in(tmp_path) == []


def test_more_processes_than_there_are_is_an_error_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError, match="--num-gpus: got 2 .*accepted: 1, or start by trainkit.engine.launch"):
        default_setup(cfg_for(tmp_path / "run"), Namespace(num_gpus=2))
    assert names_in(tmp_path) == []


def test_the_config_is_printed_before_anything_is_made(tmp_path, capsys):
    cfg = cfg_for(tmp_path / "run", "SOLVER.MAX_ITER", "3ep")
    with pytest.raises(SystemExit) as caught:
        default_setup(cfg, Namespace(print_config=True))
    again = get_cfg()
    again.merge_from_other_cfg(CfgNode.load_cfg(capsys.readouterr().out))
    assert (caught.value.code, again, names_in(tmp_path)) == (None, cfg, [])


@pytest.mark.parametrize("set_up", [lambda cfg: default_setup(cfg, NEW), DefaultTrainer])
def test_a_relative_folder_stays_where_it_is_when_a_hook_changes_the_current_one(tmp_path, monkeypatch, set_up):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cfg = tiny_cfg("run", "CHECKPOINT.DIR", "~/files")
    set_up(cfg)
    assert (str(tmp_path / "run"), str(tmp_path / "home/files")) == (cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR)


@pytest.mark.parametrize(
    "options",
    [
        ["IMPORTS", ["no_such_module_of_mine"]],
        ["SOLVER.MAX_ITER", 0],
        ["SEED", 2**32],
        ["FLOAT32_PRECISION", "low"],
        ["DETERMINISTIC", True, "CUDNN_BENCHMARK", True],
    ],
)
def test_a_config_that_cannot_be_run_leaves_the_files_of_an_older_run_where_they_are(tmp_path, options):
    for name in ("model_0000004.pth", "last_checkpoint", "config.yaml"):
        (tmp_path / name).write_text("old")
    cfg = cfg_for(tmp_path, *options)
    with pytest.raises(ConfigError):
        default_setup(cfg, NEW)
    assert names_in(tmp_path) == ["config.yaml", "last_checkpoint", "model_0000004.pth"]
    assert (tmp_path / "config.yaml").read_text() == "old"
    default_setup(cfg_for(tmp_path), NEW)
    assert names_in(tmp_path) == ["config.yaml", "log.txt", "previous_1"]


# ---------------------------------------------------------------------- writers


def test_the_default_writers(tmp_path):
    kinds = [type(writer) for writer in default_writers(tmp_path, 10)]
    assert kinds == [CommonMetricPrinter, JSONWriter, TensorboardXWriter]
    assert [type(writer) for writer in default_writers(tmp_path, names=["json"])] == [JSONWriter]
    with pytest.raises(ConfigError, match="LOG.WRITERS: unknown 'jsn'; did you mean 'json'"):
        default_writers(tmp_path, names=["jsn"])


def test_a_registered_writer_gets_the_folder_and_the_window_and_the_config_if_it_takes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(WRITER_REGISTRY, "_objects", {})

    @WRITER_REGISTRY.register()
    class Mine(EventWriter):
        def __init__(self, output_dir, window_size):
            self.given = output_dir, window_size

    @WRITER_REGISTRY.register()
    class OfAConfig(EventWriter):
        def __init__(self, output_dir, window_size, cfg):
            self.given = cfg

    @WRITER_REGISTRY.register()
    class NoArguments(EventWriter): ...

    first, second = default_writers(tmp_path, names=["json", "Mine"], window_size=7)
    assert (type(first), type(second), second.given) == (JSONWriter, Mine, (tmp_path, 7))
    [shows_settings] = default_writers(tmp_path, names=["OfAConfig"], cfg=get_cfg())
    assert shows_settings.given == get_cfg()
    with pytest.raises(ConfigError, match=r"LOG.WRITERS: .*NoArguments.* takes no arguments"):
        default_writers(tmp_path, names=["NoArguments"])


def test_without_tensorboard_its_writer_is_left_out_with_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    caplog.set_level(logging.INFO)
    kinds = [type(writer) for writer in default_writers(tmp_path, 10)]
    assert kinds == [CommonMetricPrinter, JSONWriter]
    assert caplog.messages == [
        "Nothing is written for TensorBoard; to change that: pip install 'trainkit[tensorboard]'"
    ]
