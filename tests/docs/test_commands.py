"""No command that the documentation shows fails.

Each is understood by the program that it calls, with its options and keys. Those that train are run here as a trial, in
a folder of their own; other tests run the others.
"""

import importlib.util
import re
import shlex

import pytest
import torch
from torch.distributed.run import get_args_parser

from projects.digits.model import DigitsCNN
from tests.docs.pages import (
    PAGES,
    ROOT,
    blocks,
    commands,
    inline_commands,
    page,
    shell_lines,
    tool_of,
)
from tools import lazyconfig_train_net, train_net
from trainkit.checkpoint import Checkpointer
from trainkit.config import LazyConfig, check_values, get_cfg
from trainkit.engine import default_argument_parser

TRAIN, LAZY = "tools/train_net.py", "tools/lazyconfig_train_net.py"


def shown(find):
    """Distinct commands, in words, and for each the page on which it is first."""
    found = {}
    for name in PAGES:
        for line in find(page(name)):
            for words in commands(line):
                found.setdefault(tuple(word for word in words if word != "..."), name)
    return found


IN_BLOCKS, IN_TEXT = shown(shell_lines), shown(inline_commands)
COMMANDS = {**IN_TEXT, **IN_BLOCKS}


# the first settings of each answer in the table of what is asked for
ASKED = re.findall(
    r"^\| .+? \| \[.+?\) \| [^`\n]*`(--\w[^`]*|[A-Z_.]+ [^`]+)`",
    page("docs/asked_for.md"),
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A clone's, where commands are given, with the files of one's own that they name."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("projects", "tools"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("job.yaml", "my.yaml", "config.yaml"):
        (folder / name).write_text(f"_BASE_: {ROOT}/projects/digits/config.yaml\n")
    LazyConfig.save(LazyConfig.load(lazyconfig_train_net.DEFAULT_CONFIG), folder / "lazy.yaml")
    (folder / "output/lazy").mkdir(parents=True)
    (folder / "lazy.yaml").rename(folder / "output/lazy/config.yaml")
    Checkpointer(DigitsCNN(16), folder).save("base")
    (folder / "my_hooks.py").write_text(blocks("docs/hooks.md", "python")[1])
    (folder / "my_parts.py").write_text(blocks("docs/extending.md", "python")[0])
    Checkpointer(DigitsCNN(16), folder / "output/digits").save("model_best")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    """As on the machine of a reader, who has no GPU."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("FVCORE_CACHE", str(folder / "cache"))  # for runs at an address
    return folder


EXTRAS = re.findall(
    r'^ {8}"(\w+)":', page("setup.py").partition("extras_require={")[2], re.MULTILINE
)


def understand(words):
    """Let the program of a command read its arguments.

    Raises:
        AssertionError, SystemExit, or what a config raises: it does not understand them.
    """
    match words:
        case ["srun", *command] | ["timeout", "-s", "KILL", _, *command]:
            understand(command)
        case ["torchrun", *args]:
            read = get_args_parser().parse_args(args)
            understand(
                ["python", *["-m"] * read.module, read.training_script, *read.training_script_args]
            )
        case ["pip", "install", *_, target]:
            assert re.fullmatch(rf"(\.|trainkit)(\[({'|'.join(EXTRAS)})\])?|mlflow|s3fs", target)
        case ["python", "-c", code]:
            compile(code, "page", "exec")
        case ["python", "-m", module, *_] if module.startswith("trainkit.projects."):
            tool, args = tool_of(words)
            read_by(tool, args)
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module)  # what it imports may not be installed
        case ["python", ".ci/check_messages.py"] | ["head=$(scontrol", *_] | ["head", *_]:
            pass
        case ["python", script, *args]:
            read_arguments(script, args)
        case _:
            assert words[0] in ("ruff", "mypy", "pytest", "sphinx-build")


def read_arguments(script, args):
    if script in ("train.py", "mine.py"):
        get_cfg().merge_from_list(default_argument_parser().parse_args(args).opts)
        return
    if script == "sweep.py":
        assert not args
        return
    assert (ROOT / script).exists(), f"there is no {script}"
    tool, _ = tool_of(["python", script])
    if script == TRAIN:
        read, cfg = default_argument_parser().parse_args(args), get_cfg()
        cfg.merge_from_file(read.config_file or str(tool.DEFAULT_CONFIG))
        cfg.merge_from_list(read.opts)
        check_values(cfg)
    elif script == LAZY:
        read = default_argument_parser().parse_args(args)
        LazyConfig.apply_overrides(
            LazyConfig.load(read.config_file or tool.DEFAULT_CONFIG), read.opts
        )
    else:
        read_by(tool, args)


def read_by(tool, args):
    if hasattr(tool, "parse_args"):
        tool.parse_args(args)
    else:
        assert not args


WRONG = [
    "python tools/train_net.py --fast-dev-ran",
    "python tools/train_net.py SOLVER.BASE_LRS 0.1",
    "python tools/train_net.py --config-file their.yaml",
    "python tools/plot_metrics.py",
    "python -m trainkit.projects.predict",
    "torchrun --nproc=2 tools/train_net.py",
    "pip install -e '.[plots]'",
]


def problems(lines):
    """command -> what is wrong with it"""
    found = {}
    for words in lines:
        try:
            understand(list(words))
        except (AssertionError, ImportError, OSError, SystemExit, ValueError) as error:
            found[" ".join(words)] = repr(error)
    return found


def test_every_command_is_understood_and_one_that_would_fail_is_found(here):
    assert len(COMMANDS) > 120
    assert problems(COMMANDS) == {}
    assert len(ASKED) > 15
    assert (
        problems(
            ["python", TRAIN, "SOLVER.WARMUP_ITERS", "0", *shlex.split(asked)] for asked in ASKED
        )
        == {}
    )
    assert len(problems(words for line in WRONG for words in commands(line))) == len(WRONG)


# tests of the projects run these: they end the process, or need a run, an address or a package that is not here
ELSEWHERE = re.compile(
    r"--num-gpus|--preflight|--print-config|--fork|s3://|weights\.safetensors|vision_text"
)
ALONE = [
    words
    for words in IN_BLOCKS
    if {TRAIN, LAZY} & {*words[1:2]} and not ELSEWHERE.search(" ".join(words))
]


@pytest.mark.slow
@pytest.mark.parametrize("words", ALONE, ids=" ".join)
def test_what_trains_runs(here, capsys, words):
    tool = {TRAIN: train_net, LAZY: lazyconfig_train_net}[words[1]]
    tool.main(default_argument_parser().parse_args([*words[2:], "--fast-dev-run"]))
    printed = capsys.readouterr().out
    assert re.search(
        "(The|This) run has finished|The trial run was trained|Evaluation results", printed
    )
