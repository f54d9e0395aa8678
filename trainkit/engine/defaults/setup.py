"""The start of an entry script: arguments, output folder, log, seed, writers."""

import argparse
import importlib.util
import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import torch

from trainkit.checkpoint import CheckpointError
from trainkit.config import CfgNode, ConfigError, check_values, get_cfg, import_modules
from trainkit.config.config import changed_settings
from trainkit.engine.defaults.folders import can_log, prepare_folders, use_local_folders
from trainkit.engine.launch import check_launch, is_restarted, is_torchrun
from trainkit.modeling.build import choose_device
from trainkit.utils import comm, events
from trainkit.utils.collect_env import collect_env_info
from trainkit.utils.env import seed_all_rng
from trainkit.utils.errors import unknown_name
from trainkit.utils.logger import LINE_WIDTH, break_line, log_file, printable, setup_logger
from trainkit.utils.plugins import find_plugins, load, type_name
from trainkit.utils.run_folder import is_in_use

logger = logging.getLogger(__name__)

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """The options of a training script; ``epilog`` replaces the examples at the end of the help."""
    script = sys.argv[0]
    on_two = f"{script} --num-gpus 8 --num-machines 2 --dist-url tcp://HOST:PORT"
    examples = f"""
Examples:
  one process    {script} --config-file cfg.yaml SOLVER.BASE_LR 0.001 SOLVER.MAX_ITER 3ep
  8 GPUs         {script} --num-gpus 8 --config-file cfg.yaml
  2 machines     {on_two} --machine-rank 0
                 {on_two} --machine-rank 1
  torchrun       torchrun --nproc-per-node 8 {script} --config-file cfg.yaml
"""
    parser = argparse.ArgumentParser(
        epilog=epilog or examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --res is a misspelled option, not --resume
    )

    def parse_args(*given: Any, **named: Any) -> Any:
        args = parser.parse_intermixed_args(*given, **named)  # options after KEY VALUE pairs too
        if not is_torchrun():
            with user_errors_exit():
                check_launch(args.num_gpus, args.num_machines, args.machine_rank, args.dist_url)
        return args

    parser.parse_args = parse_args  # type: ignore[method-assign]
    add = parser.add_argument
    add_flag = partial(parser.add_argument, action="store_true")
    add(
        "--config-file", default="", metavar="FILE", help="a YAML file with changes to the defaults"
    )
    add_flag("--resume", help="resume from the last checkpoint in OUTPUT_DIR, if any")
    add_flag(
        "--eval-only",
        help="evaluate MODEL.WEIGHTS; if empty, or with --resume, the last checkpoint",
    )
    add_flag("--print-config", help="print the settings of the job as YAML, and stop")
    add_flag("--quiet", help="show only warnings and errors; log.txt has all lines")
    add(
        "--num-gpus",
        type=int,
        default=1,
        help="processes of this machine, each with a GPU if there are any; 0: one on the CPU",
    )
    add("--num-machines", type=int, default=1)
    add("--machine-rank", type=int, default=0, help="number of this machine, from 0")
    add(
        "--dist-url",
        default="auto",
        help="where rank 0 listens; auto is a free port of this machine",
    )
    for plugin in find_plugins().each:
        plugin.add_options(parser)
    add(
        "opts",
        nargs="*",
        metavar="KEY VALUE",
        help="changes to the config, such as SOLVER.BASE_LR 0.1",
    )
    return parser


@contextmanager
def user_errors_exit() -> Iterator[None]:
    """Context that ends the process with one message.

    The exit code is 2 for an error in the config or a file, 130 for Ctrl-C.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        if not comm.is_main_process():
            # usually rank 0 has the same error, and with its end this process ends too
            time.sleep(5)
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if comm.is_main_process():
            print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def default_setup(cfg: Any, args: Any) -> None:
    """Make the output folder, set up the log, write ``config.yaml``, seed everything.

    Every rank calls it. A process has one log: a second call takes it over, and says so. A new run
    moves the files of an earlier one into ``previous_<n>`` in the folder; a run that torchrun has
    restarted counts as resumed.

    Args:
        cfg: a config of `get_cfg`, or of another type that a project reads. Folders become absolute
            in it, and a device "auto" becomes the one that is used, so that
            ``model.to(cfg.MODEL.DEVICE)`` works.
        args: has ``resume`` and ``eval_only`` if they are set, see `default_argument_parser`.

    Raises:
        ConfigError: a folder cannot be written, or a setting is not accepted.
    """
    given = cfg
    text = ""
    lost: list[str] = []
    if not isinstance(cfg, CfgNode):
        readers = find_plugins().config_types
        if type_name(cfg) not in readers:
            check_values(cfg)  # refuses it
        read_config = load(readers[type_name(cfg)])
        cfg, text, lost = read_config(cfg, args)
    resume = getattr(args, "resume", False) or is_restarted()
    eval_only = getattr(args, "eval_only", False)
    when_ready = apply_options(given, args)
    if getattr(args, "num_gpus", None) == 0:
        cfg.MODEL["DEVICE"] = "cpu"  # by item, since the config may be frozen
    is_own = not text  # else a project has read it
    text = text or cfg.dump()
    import_modules(cfg.IMPORTS)
    check_values(cfg)
    if getattr(args, "print_config", False):
        if comm.is_main_process():
            print(text, end="")
        sys.exit()
    use_local_folders(cfg)
    notes = prepare_folders(cfg, text, resume=resume, eval_only=eval_only)
    comm.synchronize()
    for call in when_ready:
        call()
    _set_up_log(cfg, eval_only=eval_only, is_quiet=getattr(args, "quiet", False))
    _log_start(eval_only)
    logger.info("%s", _described_changes(cfg) if is_own else f"Configuration:\n{text.rstrip()}")
    if lost:
        logger.warning(
            "config.yaml has only the names of these values, so it cannot be used as a config: %s",
            ", ".join(lost),
        )
    for note in notes:
        logger.info(note)
    seed = None
    if cfg.SEED >= 0:
        seed = (cfg.SEED + comm.get_rank()) % 2**32  # NumPy takes 32 bits
    seed_all_rng(seed)
    _set_switches(cfg, eval_only)


def _set_up_log(cfg: CfgNode, *, eval_only: bool, is_quiet: bool) -> None:
    former_log = log_file()
    former_folder = os.path.dirname(former_log)
    if former_log and former_folder != cfg.OUTPUT_DIR and is_in_use(former_folder):
        logger.warning(
            "A job in %s takes over the log of this process, also the lines of the run that still "
            "trains here",
            cfg.OUTPUT_DIR,
        )
    has_file = not eval_only or can_log(cfg.OUTPUT_DIR)
    setup_logger(
        cfg.OUTPUT_DIR if has_file else None,
        distributed_rank=comm.get_rank(),
        stdout_level="WARNING" if is_quiet else cfg.LOG.LEVEL,
        enable_propagation=cfg.LOG.PROPAGATE,
    )
    if former_log and former_log != log_file():
        logger.info(
            "This job takes over the log of this process, which was %s until now", former_log
        )


def _log_start(eval_only: bool) -> None:
    """Log what this process is, and what it shall do."""
    logger.info("Rank %d of %d", comm.get_rank(), comm.get_world_size())
    for reason in find_plugins().switched_off:
        logger.warning(reason)
    logger.debug("Environment:\n%s", collect_env_info())
    logger.info("Command: %s", " ".join(sys.argv))
    if is_restarted() and not eval_only:
        logger.info("The run was restarted; it resumes from its last checkpoint, if there is one")


def _described_changes(cfg: CfgNode) -> str:
    lines = ["Configuration, as far as it differs from the defaults:"]
    for key, value in changed_settings(cfg, get_cfg()):
        line = break_line(f"{key}: {value!r}", LINE_WIDTH - 2)
        lines.append(indent(line, "  "))
    if len(lines) == 1:
        lines.append("  nowhere")
    return "\n".join(lines)


# sets back what the last default_setup of this process has switched on
_switch_back: list[Callable[[], object]] = []


def _set_switches(cfg: CfgNode, eval_only: bool) -> None:
    """Set torch's switches, which the process has once; first set those of an earlier job back."""
    while _switch_back:
        set_back = _switch_back.pop()
        set_back()
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not eval_only
    if cfg.NUM_THREADS > 0:
        set_num_threads(cfg.NUM_THREADS)
    if cfg.DETERMINISTIC:
        was_on = torch.are_deterministic_algorithms_enabled()
        only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
        _switch_back.append(
            partial(torch.use_deterministic_algorithms, was_on, warn_only=only_warned)
        )
        torch.use_deterministic_algorithms(True)
        if _CUBLAS not in os.environ:
            _switch_back.append(partial(os.environ.pop, _CUBLAS, None))
            os.environ[_CUBLAS] = ":4096:8"  # required by cuBLAS
    if cfg.FLOAT32_PRECISION:
        former_precision = torch.get_float32_matmul_precision()
        _switch_back.append(partial(torch.set_float32_matmul_precision, former_precision))
        torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)
    choose_device(cfg)  # after config.yaml is written, which says "auto"


def set_num_threads(number: int) -> None:
    """Set the number of torch's threads until the next job of this process."""
    _switch_back.append(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(number)


def apply_options(cfg: Any, args: Any) -> list[Callable[[], None]]:
    """Apply the options of projects that are in ``args``.

    Call the results when OUTPUT_DIR is ready.
    """
    when_ready = []
    for plugin in find_plugins().each:
        if any(is_given(option, args) for option in plugin.options):
            call = plugin.apply_options(cfg, args)
            if call is not None:
                when_ready.append(call)
    return when_ready


def is_given(option: str, args: Any) -> bool:
    """Whether ``args``, of a parser that may not know it, has an option such as ``"--fork"``."""
    name = option.lstrip("-").replace("-", "_")
    return bool(getattr(args, name, None))


def default_writers(
    output_dir: str | os.PathLike[str],
    max_iter: int | None = None,
    names: Sequence[str] = ("console", "json", "tensorboard"),
    window_size: int = 20,
    iters_per_epoch: int | Fraction | None = None,
    *,
    cfg: CfgNode | None = None,
) -> list[events.EventWriter]:
    """Writers by name.

    Names: "console" (at most one line per second), "json" (``metrics.json``), "tensorboard" (left
    out if the package is missing), and those of ``WRITER_REGISTRY``, such as "csv" and
    "progress_bar"; ``cfg`` is for those that take it.

    Raises:
        ConfigError: it is another name, or the package that a writer needs is missing.
    """
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    if "tensorboard" in names and not (has_tensorboard and "tensorboard" in events.WRITER_REGISTRY):
        logger.info(
            "Nothing is written for TensorBoard; to change that: pip install "
            "'trainkit[tensorboard]'"
        )
        names = [name for name in names if name != "tensorboard"]

    def make(name: str) -> events.EventWriter:
        if name == "console":
            return events.CommonMetricPrinter(
                max_iter, window_size, iters_per_epoch=iters_per_epoch, min_interval_sec=1.0
            )
        if name == "json":
            return events.JSONWriter(Path(output_dir, "metrics.json"), window_size)
        if name not in events.WRITER_REGISTRY:
            known = ["console", "json", *(registered for registered, _ in events.WRITER_REGISTRY)]
            raise unknown_name("LOG.WRITERS", name, "accepted", known)
        maker = events.WRITER_REGISTRY.get(name)
        writer: events.EventWriter
        if "cfg" in inspect.signature(maker).parameters:
            writer = maker(output_dir, window_size, cfg=cfg)
        else:
            writer = maker(output_dir, window_size)
        return writer

    try:
        return [make(name) for name in names]
    except ImportError as error:  # the package of a writer
        raise ConfigError(f"LOG.WRITERS: {error}") from error
