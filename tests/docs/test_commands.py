"""No command that the documentation shows fails.

Each is understood by the program that it calls, with its options and keys. Those that train are run here as a trial, in
a folder of their own; other tests, which are named here, run the others.
"""

import importlib.util
import re

import pytest
import torch
from torch.distributed.run import get_args_parser

from projects.charlm import sample
from projects.digits.model import DigitsCNN
from tests.docs.pages import PAGES, ROOT, blocks, commands, inline_commands, page, shell_lines
from tests.forked import run_forked, script
from tools import lazyconfig_train_net, train_net
from trainkit.checkpoint import Checkpointer
from trainkit.config import LazyConfig, check_values, get_cfg
from trainkit.engine import default_argument_parser
from trainkit.utils.logger import close_logger

TRAIN, LAZY = "tools/train_net.py", "tools/lazyconfig_train_net.py"

# what runs a program; train_net.py with the commands of all pages is run below
RUN_BY = {
    "train.py": (
        "tests/docs/test_getting_started.py::test_the_job_learns_the_spirals_and_two_runs_are_compared_in_a_picture"
    ),
    "tools/analyze_model.py": "tests/docs/test_tools.py::test_a_command_prints_what_the_page_shows",
    "tools/predict.py": "tests/docs/test_tools.py::test_a_command_prints_what_the_page_shows",
    "tools/inspect_checkpoint.py": "tests/docs/test_tools.py::test_a_command_prints_what_the_page_shows",
    "trainkit.projects.replay": (
        "tests/docs/test_replay.py::test_the_hunt_prints_what_the_page_shows_and_leaves_the_run_as_it_is"
    ),
    "tools/convert_checkpoint.py": (
        "projects/weights/tests/test_pickles.py::test_the_tool_writes_a_checkpoint_that_anybody_can_load"
    ),
    "tools/plot_metrics.py": "tests/docs/test_plots.py::test_each_command_writes_what_the_page_says",
    "tools/find_lr.py": "tests/tools/test_find_lr.py::test_the_picture_is_the_only_file_that_is_written",
    "tools/find_batch_size.py": (
        "tests/tools/test_find_batch_size.py::test_real_steps_are_made_with_each_size_and_a_table_is_printed"
    ),
    "tools/export.py": "tests/tools/test_export.py::test_the_file_gives_what_the_model_gives_for_batches_of_any_size",
    "tools/sweep.py": (
        "tests/tools/test_sweep.py::test_the_table_has_the_best_run_first_and_what_has_failed_is_tried_again"
    ),
    "tools/config_reference.py": "tests/docs/test_config.py::test_a_page_is_what_the_tool_writes_now",
    "tools/chaos.py": "tests/tools/test_chaos.py::test_a_run_killed_three_times_ends_as_one_that_was_left_alone",
    "tools/benchmark.py": "tests/tools/test_benchmark.py::test_all_rows_are_measured_with_their_own_rounds_by_default",
    "tests/mutation.py": "tests/test_mutation.py::test_a_mutant_is_another_program",
    "tests/same_bits.py": "tests/test_same_bits.py::test_the_script_names_the_part_that_differs_from_its_record",
    "projects.selfsup.compare": (
        "tests/projects/test_selfsup.py::test_the_comparison_prints_one_row_per_method_with_the_value_of_each_seed"
    ),
    "projects.charlm.sample": "tests/docs/test_commands.py::test_a_language_model_is_trained_and_writes_on",
    "projects.vision_text.vit": "tests/projects/test_vision_text.py::test_a_subclass_trains_it_too",
    TRAIN: "tests/docs/test_commands.py::test_what_trains_runs",
    LAZY: "tests/docs/test_commands.py::test_what_trains_runs",
}

NOT_RUN = {
    "pip": "CI installs the package; its extras are looked up here",
    "ruff": "CI runs it",
    "mypy": "CI runs it",
    ".ci/check_messages.py": "CI runs it",
    "pytest": "this is it",
    "sphinx-build": "tests/docs/test_site.py builds the pages",
    "head=$(scontrol": "SLURM",
    "head": "the shell's own",
    "tools/render_examples.py": "trains three runs and needs a browser; what it calls is tested in tests/tools/plots",
}


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


def each(commands):
    return pytest.mark.parametrize("words", commands, ids=" ".join)


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
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    """As on the machine of a reader, who has no GPU."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("FVCORE_CACHE", str(folder / "cache"))  # for runs at an address
    yield folder
    close_logger()


# ---------------------------------------------------------------------- each is understood


def extras():
    """Those of setup.py."""
    (keys,) = re.findall(r"extras_require=\{(.*?)\n    \}", page("setup.py"), re.DOTALL)
    return re.findall(r'^ +"(\w+)":', keys, re.MULTILINE)


def understand(words):
    """Let the program of a command read its arguments; gives the program.

    Raises:
        AssertionError, SystemExit, or what a config raises: it does not understand them.
    """
    match words:
        case ["srun", *command] | ["timeout", "-s", "KILL", _, *command]:
            return understand(command)
        case ["torchrun", *args]:
            read = get_args_parser().parse_args(args)
            return understand(["python", *["-m"] * read.module, read.training_script, *read.training_script_args])
        case ["pip", "install", "-e", target]:
            assert re.fullmatch(rf"\.(\[({'|'.join(extras())})\])?", target)
            return "pip"
        case ["python", "-c", code]:
            compile(code, "page", "exec")
            return "tools/predict.py"  # which reads what it makes
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module)  # what it imports may not be installed
            return module
        case ["python", ".ci/check_messages.py"]:
            return words[1]
        case ["python", script, *args]:
            read_arguments(script, args)
            return script
    return words[0]


def read_arguments(script, args):
    if script == "train.py":
        get_cfg().merge_from_list(default_argument_parser().parse_args(args).opts)
        return
    assert (ROOT / script).exists(), f"there is no {script}"
    tool = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    if script == TRAIN:
        read, cfg = default_argument_parser().parse_args(args), get_cfg()
        cfg.merge_from_file(read.config_file or str(tool.DEFAULT_CONFIG))
        cfg.merge_from_list(read.opts)
        check_values(cfg)
    elif script == LAZY:
        read = default_argument_parser().parse_args(args)
        LazyConfig.apply_overrides(LazyConfig.load(read.config_file or tool.DEFAULT_CONFIG), read.opts)
    elif hasattr(tool, "parse_args"):
        tool.parse_args(args)
    else:
        assert not args


@each(COMMANDS)
def test_a_command_is_understood_and_a_test_runs_its_program(here, words):
    program = understand(words)
    if program not in NOT_RUN:
        file, _, name = RUN_BY[program].partition("::")
        assert f"\ndef {name}(" in page(file)


@pytest.mark.parametrize(
    "line",
    [
        "python tools/train_net.py --fast-dev-ran",
        "python tools/train_net.py SOLVER.BASE_LRS 0.1",
        "python tools/train_net.py SOLVER.BASE_LR high",
        "python tools/train_net.py --config-file their.yaml",
        "python tools/train_nets.py",
        "python tools/config_reference.py docs/config.md",
        "python tools/plot_metrics.py",
        "python tools/lazyconfig_train_net.py train.max_iters=400",
        "python -m projects.charlm.samples",
        "torchrun --nproc=2 tools/train_net.py",
        "torchrun --nproc-per-node=2 tools/train_net.py SOLVER.STEP 3",
        "pip install -e '.[plots]'",
    ],
)
def test_a_command_that_would_fail_is_found(here, line):
    with pytest.raises((AssertionError, ImportError, OSError, SystemExit, ValueError)):
        understand(*commands(line))


def test_what_is_not_run_is_still_shown():
    assert {program for program in NOT_RUN if not any(program in words for words in COMMANDS)} == set()


# ---------------------------------------------------------------------- what trains is run


def train(words):
    tool = {TRAIN: train_net, LAZY: lazyconfig_train_net}[words[1]]
    tool.main(default_argument_parser().parse_args([*words[2:], "--fast-dev-run"]))


# tests of the projects run these: they end the process, or need a run, an address or a package that is not here
ELSEWHERE = {"--num-gpus", "--preflight", "--fork", "s3://bucket/run1", "weights.safetensors"}
ALONE = [words for words in IN_BLOCKS if {TRAIN, LAZY} & {*words[1:2]} and not ELSEWHERE & {*words}]
TOGETHER = next(words for words in IN_BLOCKS if words[0] == "torchrun" and "--nnodes" not in " ".join(words))


@pytest.mark.slow
@each([words for words in ALONE if "charlm" not in IN_BLOCKS[words] and "vision_text" not in " ".join(words)])
def test_what_trains_runs(here, capsys, words):
    train(words)
    assert re.search(
        "(The|This) run has finished|The trial run was trained|Evaluation results", capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_language_model_is_trained_and_writes_on(here, capsys):
    (words,) = [words for words in ALONE if "charlm" in IN_BLOCKS[words]]
    (writes,) = [words for words in IN_BLOCKS if "projects.charlm.sample" in words]
    train(words)
    close_logger()
    capsys.readouterr()
    at = [word.replace("output/charlm", "output/charlm/fast_dev_run") for word in writes[3:]]
    sample.main([*at, "--length", "9"])
    assert re.fullmatch(r"def [\s\S]{9}\n", capsys.readouterr().out)


@pytest.mark.slow
def test_several_processes_run(here):
    read = get_args_parser().parse_args(TOGETHER[1:])
    command = script(read.training_script, *read.training_script_args, "--fast-dev-run")
    done = run_forked(command, here, num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert "The run has finished" in done.stdout
