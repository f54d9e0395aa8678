"""The start of an entry script."""

import logging
import os
import re
import sys
import time
from argparse import Namespace
from pathlib import Path

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
from trainkit.utils.device import resolve_device
from trainkit.utils.events import CommonMetricPrinter, EventStorage, JSONWriter, TensorboardXWriter
from trainkit.utils.run_folder import LOCK_FILE, release_folder

NEW, RESUME, EVAL = (
    Namespace(resume=False, eval_only=False),
    Namespace(resume=True),
    Namespace(eval_only=True),
)


@pytest.fixture(autouse=True)
def released(tmp_path):
    yield
    for folder in (tmp_path, tmp_path / "run"):
        release_folder(folder)


def cfg_for(output_dir, *options):
    cfg = get_cfg()
    cfg.merge_from_list(["OUTPUT_DIR", str(output_dir), "SEED", 3, *options])
    return cfg


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK_FILE)


def test_options_may_stand_before_and_after_the_key_value_pairs(capsys):
    args = default_argument_parser().parse_args(
        ["--num-gpus", "2", "SOLVER.MAX_ITER", "-1", "--resume", "SEED", "5"]
    )
    assert args.num_gpus == 2
    assert args.resume is True
    assert args.opts == ["SOLVER.MAX_ITER", "-1", "SEED", "5"]
    with pytest.raises(SystemExit, match="^2$"):
        default_argument_parser().parse_args(["SEED", "1", "--res"])
    assert "unrecognized arguments: --res" in capsys.readouterr().err
    args = vars(default_argument_parser().parse_args([]))
    of_the_core = {
        "config_file": "",
        "resume": False,
        "eval_only": False,
        "print_config": False,
        "quiet": False,
    }
    of_the_core |= {
        "num_gpus": 1,
        "num_machines": 1,
        "machine_rank": 0,
        "dist_url": "auto",
        "opts": [],
    }
    assert {name: args[name] for name in of_the_core} == of_the_core


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ConfigError("MODEL.NAME is empty"), 2, "error: MODEL.NAME is empty\n"),
        (CheckpointError("no such file"), 2, "error: no such file\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_mistake_of_the_user_and_ctrl_c_end_with_one_line(
    error, code, printed, capsys, monkeypatch
):
    monkeypatch.setattr(time, "sleep", lambda sec: pytest.fail("rank 0 waits for nobody"))
    with pytest.raises(SystemExit, match=f"^{code}$"), user_errors_exit():
        raise error
    assert capsys.readouterr().err == printed


def test_a_mistake_of_the_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), user_errors_exit():
        1 / 0  # noqa: B018


def test_setup_writes_the_whole_config_and_logs_what_differs_from_the_defaults(tmp_path):
    cfg = cfg_for(
        tmp_path / "run", "SOLVER.BASE_LR", 0.5, "MODEL.MY_WIDTH", 7, "FLOAT32_PRECISION", "medium"
    )
    default_setup(cfg, NEW)
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")
    with pytest.raises(ConfigError, match=r"cfg is a builtins\.dict; use trainkit's get_cfg"):
        default_setup({}, NEW)
    again = get_cfg()
    again.merge_from_file(str(tmp_path / "run/config.yaml"))
    assert again.MODEL.DEVICE == "auto"
    assert str(resolve_device("auto")) == cfg.MODEL.DEVICE
    again.MODEL.DEVICE = cfg.MODEL.DEVICE
    assert again == cfg
    log = (tmp_path / "run/log.txt").read_text()
    assert "  SOLVER.BASE_LR: 0.5\n" in log
    assert "  MODEL.MY_WIDTH: 7\n" in log
    assert "WEIGHT_DECAY" not in log
    assert f"Command: {sys.argv[0]}" in log
    assert not torch.are_deterministic_algorithms_enabled()
    default_setup(cfg_for(tmp_path / "run", "DETERMINISTIC", True), NEW)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    assert torch.__version__ in log


def test_config_yaml_has_the_settings_of_the_last_start(tmp_path):
    for rate, args in ((0.5, NEW), (0.25, RESUME), (0.125, EVAL)):
        default_setup(cfg_for(tmp_path, "SOLVER.BASE_LR", rate), args)
    cfg = get_cfg()
    cfg.merge_from_file(tmp_path / "config.yaml")
    assert cfg.SOLVER.BASE_LR == 0.25  # an evaluation is no start of the run


@pytest.mark.parametrize(
    ("options", "shown", "passed_on"),
    [
        ([], ["info", "warning"], []),
        (["LOG.LEVEL", "WARNING"], ["warning"], []),
        (["LOG.LEVEL", "DEBUG"], ["debug", "info", "warning"], []),
        (["LOG.PROPAGATE", True], ["info", "warning"], ["debug", "info", "warning"]),
    ],
    ids=str,
)
def test_the_terminal_shows_lines_from_a_level_on_and_the_file_has_all(
    tmp_path, capsys, caplog, options, shown, passed_on
):
    caplog.set_level(logging.DEBUG)
    default_setup(cfg_for(tmp_path, *options), NEW)
    for level in ("debug", "info", "warning"):
        getattr(logging.getLogger("trainkit.tests"), level)("a line of level %s", level)

    def levels(text):
        return re.findall("a line of level (.+)", text)

    assert levels(capsys.readouterr().out) == shown
    assert levels("\n".join(caplog.messages)) == passed_on
    assert levels((tmp_path / "log.txt").read_text()) == ["debug", "info", "warning"]


@pytest.fixture
def switches():
    """Reads torch's switches of this process, and sets them back at the end."""

    def read():
        return {
            "deterministic": torch.get_deterministic_debug_mode(),
            "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            "precision": torch.get_float32_matmul_precision(),
            "benchmark": torch.backends.cudnn.benchmark,
            "threads": torch.get_num_threads(),
        }

    torch.set_num_threads(2)
    former = read()
    yield read
    torch.set_deterministic_debug_mode(former["deterministic"])
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.set_float32_matmul_precision(former["precision"])
    torch.backends.cudnn.benchmark = former["benchmark"]
    torch.set_num_threads(1)


def test_the_switches_of_a_job_end_with_the_next_job_of_the_process(tmp_path, switches):
    all_on = ["DETERMINISTIC", True, "FLOAT32_PRECISION", "medium", "CUDNN_BENCHMARK", True]
    all_on += ["NUM_THREADS", 3]
    plain = switches()
    assert plain == {
        "deterministic": 0,
        "workspace": None,
        "precision": "highest",
        "benchmark": False,
        "threads": 2,
    }
    for _ in range(2):
        default_setup(cfg_for(tmp_path, *all_on), NEW)
        assert switches() == {
            "deterministic": 2,
            "workspace": ":4096:8",
            "precision": "medium",
            "benchmark": True,
            "threads": 3,
        }
    default_setup(cfg_for(tmp_path, "FLOAT32_PRECISION", "high"), NEW)
    assert switches() == {**plain, "precision": "high"}
    default_setup(cfg_for(tmp_path), NEW)
    assert switches() == plain


def test_a_switch_that_the_program_has_set_itself_stays_as_it_was(tmp_path, switches, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    own = switches()
    default_setup(cfg_for(tmp_path), NEW)
    assert switches() == own
    default_setup(cfg_for(tmp_path, "DETERMINISTIC", True, "FLOAT32_PRECISION", "medium"), NEW)
    assert switches() == {
        "deterministic": 2,
        "workspace": ":16:8",
        "precision": "medium",
        "benchmark": False,
        "threads": 2,
    }
    default_setup(cfg_for(tmp_path), NEW)
    assert switches() == own


@pytest.mark.parametrize(("seed", "is_same"), [(3, True), (-1, False)])
def test_setup_seeds_everything(tmp_path, seed, is_same):
    drawn = []
    for _ in range(2):
        default_setup(cfg_for(tmp_path, "SEED", seed), NEW)
        drawn.append((torch.rand(1).item(), np.random.rand()))
    assert (drawn[0] == drawn[1]) is is_same
    assert ("Using the random seed " in (tmp_path / "log.txt").read_text()) is not is_same


def test_each_rank_has_the_next_seed_and_after_the_largest_comes_zero(tmp_path, monkeypatch):
    monkeypatch.setattr("trainkit.engine.defaults.setup.comm.get_rank", lambda: 1)
    seeds = []
    for seed in (3, 2**32 - 1):
        default_setup(cfg_for(tmp_path, "SEED", seed), Namespace(resume=True))
        seeds.append(torch.initial_seed())
    assert seeds == [4, 0]


RUN_FILES = [
    "metrics.json",
    "model_final.pth",
    "last_checkpoint",
    "finished",
    "events.out.tfevents.1",
    "events.cut_1",
]


def test_a_new_run_moves_the_files_of_older_ones_aside(tmp_path):
    for content in ("first", "second"):
        default_setup(cfg_for(tmp_path), NEW)
        for name in RUN_FILES:
            (tmp_path / name).write_text(content)
        (tmp_path / "model_final.shards-0a1b2c3d").mkdir()
        (tmp_path / "my_notes.txt").write_text("mine")
    default_setup(cfg_for(tmp_path), NEW)
    assert names_in(tmp_path) == [
        "config.yaml",
        "log.txt",
        "my_notes.txt",
        "previous_1",
        "previous_2",
    ]
    assert (tmp_path / "previous_1/metrics.json").read_text() == "first"
    assert (tmp_path / "previous_2/metrics.json").read_text() == "second"
    assert {*RUN_FILES, "model_final.shards-0a1b2c3d"} <= {*names_in(tmp_path / "previous_2")}


class Killed(BaseException):
    """Ends the process in its place."""


@pytest.mark.parametrize("checkpoints", ["run", "weights"])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_new_run_that_is_killed_while_it_moves_older_files_moves_the_rest_at_the_next_start(
    tmp_path, monkeypatch, checkpoints, evaluates
):
    """Whether this is told to resume or not: the older run is never resumed without a part of its files."""
    rename = Path.rename
    num_renames = 0
    kill_at = 0

    def rename_or_die(path, target):
        nonlocal num_renames
        num_renames += 1
        if num_renames == kill_at:
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_or_die)
    kills = 0
    while True:
        kill_at = kills + 1
        for args in (NEW, RESUME):
            folders = [
                tmp_path / f"{kill_at} {args.resume}" / each for each in ("run", checkpoints)
            ]
            cfg = cfg_for(folders[0], "CHECKPOINT.DIR", str(folders[1]))
            num_renames = 0
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "model_final.shards-0a1b2c3d").mkdir(exist_ok=True)
                for name in [*RUN_FILES, "log.txt"]:
                    (folder / name).write_text("older")
            try:
                default_setup(cfg, NEW)
            except Killed:
                for folder in folders:
                    release_folder(folder)
                if evaluates:
                    default_setup(cfg, EVAL)
                default_setup(cfg, args)
            for folder in folders:
                moved = [path for path in folder.rglob("previous_[0-9]*/*") if path.is_file()]
                older = {path.name for path in moved if path.read_text() == "older"}
                assert older | {"log.txt"} == {*RUN_FILES, "log.txt"}
                assert sum(path.name in RUN_FILES for path in moved) == len(RUN_FILES)
                assert {*names_in(folder)} <= {"config.yaml", "log.txt", "previous_1", "previous_2"}
                release_folder(folder)
        if num_renames < kill_at:
            break
        kills += 1
    assert kills == (len(RUN_FILES) + 3) * len({*folders})


@pytest.mark.parametrize("args", [NEW, RESUME, EVAL])
def test_nothing_is_written_through_a_link_out_of_the_folder_and_an_evaluation_moves_no_link(
    tmp_path, args
):
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
    if args is EVAL:
        assert sorted(p.name for p in folder.iterdir() if p.is_symlink()) == links
        assert names_in(outside) == ["log.txt"]
        assert (outside / "log.txt").read_text() == "of somebody else"
        default_setup(cfg_for(folder / "model_0000004.pth/unwritable"), EVAL)
        return
    metrics = JSONWriter(folder / "metrics.json")
    with EventStorage() as storage:
        storage.put_scalar("a", 1.0)
        metrics.write()
        metrics.close()
    assert names_in(outside) == ["log.txt"]
    assert (outside / "log.txt").read_text() == "of somebody else"
    assert (
        sorted(path.name for path in (folder / "previous_2").iterdir() if path.is_symlink())
        == links[:3]
    )
    assert (folder / "model_0000004.pth").exists() == (args is RESUME)


@pytest.mark.parametrize(
    ("args", "restarts", "is_kept"),
    [
        (RESUME, "0", True),
        (EVAL, "0", True),
        (NEW, "0", False),
        (NEW, "1", True),
        (RESUME, "no checkpoint", False),
    ],
)
def test_resuming_evaluating_and_restarting_move_nothing(
    tmp_path, monkeypatch, args, restarts, is_kept
):
    # the checkpoint that this names may be damaged
    names = [
        "metrics.json",
        "config.yaml",
        "last_checkpoint",
    ]
    if restarts != "no checkpoint":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    for name in names if restarts != "no checkpoint" else [*names[:2], "pretrained.pth"]:
        (tmp_path / name).write_text("old")
    default_setup(cfg_for(tmp_path), args)
    assert (tmp_path / "metrics.json").exists() is is_kept
    assert (tmp_path / "previous_1/metrics.json").exists() is not is_kept
    assert ((tmp_path / "config.yaml").read_text() == "old") is (args is EVAL)
    assert ("The run was restarted" in (tmp_path / "log.txt").read_text()) is (restarts == "1")


@pytest.mark.parametrize("start", [lambda cfg: default_setup(cfg, NEW), DefaultTrainer])
def test_folders_become_absolute(tmp_path, monkeypatch, start):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cfg = tiny_cfg("run", "CHECKPOINT.DIR", "~/files")
    start(cfg)
    assert str(tmp_path / "run") == cfg.OUTPUT_DIR
    assert str(tmp_path / "home/files") == cfg.CHECKPOINT.DIR


def test_the_config_is_printed_before_anything_is_made(tmp_path, capsys):
    cfg, again = cfg_for(tmp_path / "run", "SOLVER.MAX_ITER", "3ep"), get_cfg()
    with pytest.raises(SystemExit) as caught:
        default_setup(cfg, Namespace(print_config=True))
    again.merge_from_other_cfg(CfgNode.load_cfg(capsys.readouterr().out))
    assert caught.value.code is None
    assert again == cfg
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        (["IMPORTS", ["no_such_module_of_mine"]], NEW, "no_such_module_of_mine"),
        (["SOLVER.MAX_ITER", 0], NEW, "SOLVER.MAX_ITER"),
        (
            ["OUTPUT_DIR", "{}/config.yaml/run"],
            NEW,
            "OUTPUT_DIR '.*/run' cannot be written, choose another: ",
        ),
        (
            ["CHECKPOINT.DIR", "/proc"],
            NEW,
            "CHECKPOINT.DIR '/proc' cannot be written, choose another: ",
        ),
        (
            ["MODEL.WEIGHTS", "{}/model_final.pth"],
            NEW,
            "MODEL.WEIGHTS '.*model_final.pth' lies in OUTPUT_DIR",
        ),
        ([], RESUME, "last_checkpoint"),  # it leads out of the folder
    ],
)
def test_a_config_that_cannot_be_run_leaves_the_files_of_an_older_run_where_they_are(
    tmp_path, options, args, message
):
    names = ["config.yaml", "last_checkpoint", "model_final.pth"]
    for name in names:
        (tmp_path / name).write_text("../model.pth")
    options = [
        word.replace("{}", str(tmp_path)) if isinstance(word, str) else word for word in options
    ]
    with pytest.raises((ConfigError, CheckpointError), match=message):
        default_setup(cfg_for(tmp_path, *options), args)
    assert names_in(tmp_path) == names
    assert (tmp_path / "config.yaml").read_text() == "../model.pth"


def test_the_default_writers(tmp_path, monkeypatch, caplog):
    kinds = [type(writer) for writer in default_writers(tmp_path, 10)]
    assert kinds == [CommonMetricPrinter, JSONWriter, TensorboardXWriter]
    with pytest.raises(ConfigError, match="LOG.WRITERS: unknown 'jsn'; did you mean 'json'"):
        default_writers(tmp_path, names=["jsn"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    caplog.set_level(logging.INFO)
    assert [type(writer) for writer in default_writers(tmp_path, 10)] == kinds[:2]
    [text] = [text for text in caplog.messages if "TensorBoard" in text]
    assert "pip install 'trainkit[tensorboard]'" in text
