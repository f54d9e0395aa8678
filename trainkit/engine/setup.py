"""The start of an entry script: arguments, output folder, log, seed, writers."""

import argparse
import importlib.util
import inspect
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.atomic import write_text
from trainkit.checkpoint.folder import candidates, choose, find_checkpoint, is_file_of, local_folder, mirrors
from trainkit.checkpoint.format import owner_of_part
from trainkit.config import CfgNode, ConfigError, check_values, get_cfg, import_modules
from trainkit.config.checks import check_is_ours, similar_keys
from trainkit.config.config import changed_settings
from trainkit.engine.elastic import JOB_FILE, is_first_to_fail, is_restarted, look_for_requeue, note_begin
from trainkit.engine.launch import check_processes
from trainkit.utils import comm, events
from trainkit.utils.collect_env import collect_env_info
from trainkit.utils.env import seed_all_rng
from trainkit.utils.logger import setup_logger
from trainkit.utils.plugins import CONFIG_TYPES, OPTIONS, installed, load_plugin, type_name
from trainkit.utils.run_folder import own_folder, release_folder

logger = logging.getLogger(__name__)

# the files of a run in its output folder
_RUN_FILES = re.compile(
    r"log\.txt|.+\.rank\d+(\.pt)?|config\.yaml|batch\.json|confusion_.+\.json|metrics\.(json|csv)(\.cut_\d+)?"
    rf"|last_checkpoint|finished|{JOB_FILE}|.+\.pth|.+_published-\w{{8}}\.safetensors"
    r"|events\.out\.tfevents\..+|events\.cut_\d+"
)


_COMMAND = "__command__"  # in the __dict__ of a config, like yacs's marks: copied with the config, not written to files


class Command(NamedTuple):
    """The options of a script that `DefaultTrainer` checks."""

    resume: bool | None = None  # None: the script has no such option
    eval_only: bool = False


def command_of(cfg: CfgNode) -> Command:
    """The options with which `default_setup` was called for ``cfg``, or for the config from which it was copied."""
    return cfg.__dict__.get(_COMMAND, Command())


class _Parser(argparse.ArgumentParser):
    """Accepts options after the ``KEY VALUE`` pairs too."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found = self.parse_intermixed_args(args, namespace)
        if number := found.overfit_batches:
            found.opts += ["DATALOADER.OVERFIT_BATCHES", str(number), "TEST.MAX_BATCHES", str(number)]
        try:
            check_processes(found.num_gpus, found.num_machines, found.machine_rank, found.dist_url)
        except ValueError as error:
            self.error(str(error))
        return found


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """The options of a training script; ``epilog`` replaces the examples at the end of the help."""
    parser = _Parser(
        epilog=epilog
        or f"""
Examples:
  one process           {sys.argv[0]} --config-file cfg.yaml
  changed options       {sys.argv[0]} --config-file cfg.yaml SOLVER.BASE_LR 0.001 SOLVER.MAX_ITER 3ep
  8 GPUs                {sys.argv[0]} --num-gpus 8 --config-file cfg.yaml
  2 machines            (machine 0) {sys.argv[0]} --num-gpus 8 --num-machines 2 --machine-rank 0 --dist-url tcp://HOST:PORT
                        (machine 1) {sys.argv[0]} --num-gpus 8 --num-machines 2 --machine-rank 1 --dist-url tcp://HOST:PORT
  torchrun              torchrun --nproc-per-node 8 {sys.argv[0]} --config-file cfg.yaml
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --res is a misspelled option, not --resume
    )
    parser.add_argument("--config-file", default="", metavar="FILE", help="a YAML file with changes to the defaults")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in OUTPUT_DIR, if any")
    parser.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS, or the last checkpoint")
    parser.add_argument(
        "--overfit-batches",
        type=int,
        default=0,
        metavar="N",
        help="train on the same N batches again and again, to see whether the model can learn them; evaluate N batches",
    )
    parser.add_argument("--print-config", action="store_true", help="print the settings of the job as YAML, and stop")
    parser.add_argument("--quiet", action="store_true", help="show only warnings and errors; log.txt has all lines")
    parser.add_argument(
        "--num-gpus",
        type=int,
        default=1,
        help="processes of this machine, each with a GPU if there are any; 0: one on the CPU",
    )
    parser.add_argument("--num-machines", type=int, default=1)
    parser.add_argument("--machine-rank", type=int, default=0, help="number of this machine, from 0")
    parser.add_argument("--dist-url", default="auto", help="where rank 0 listens; auto is a free port of this machine")
    for module in dict.fromkeys(module for _, module in installed(OPTIONS)):
        module.add_options(parser)
    parser.add_argument(
        "opts", nargs="*", metavar="KEY VALUE", help="changes to the config, such as SOLVER.BASE_LR 0.1"
    )
    return parser


def checkpoint_dir(cfg: CfgNode) -> str:
    """The folder of a run's checkpoints."""
    return cfg.CHECKPOINT.DIR or cfg.OUTPUT_DIR


@contextmanager
def user_errors_exit() -> Iterator[None]:
    """Context that ends the process with one message instead of a traceback.

    The exit code is 2 for an error in the config, the command line or a file that they name, and 130 for Ctrl-C.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        if is_first_to_fail():
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if comm.is_main_process():
            print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def use_local_folders(cfg: CfgNode) -> None:
    """Make OUTPUT_DIR and CHECKPOINT.DIR absolute; an address becomes a local folder, whose files are uploaded."""
    for node, key in (cfg, "OUTPUT_DIR"), (cfg.CHECKPOINT, "DIR"):
        if node[key]:  # by item, since the config may be frozen
            node[key] = os.path.abspath(os.path.expanduser(local_folder(node[key])))


def own_folders(cfg: CfgNode, resume: bool | None = None) -> list[str]:
    """Lock OUTPUT_DIR and CHECKPOINT.DIR for this run, on rank 0; returns lines for the log.

    If they are addresses, ``resume`` is as for `trainkit.projects.remote.mirror.Mirror.take`.

    Raises:
        ConfigError: another run uses a folder, or it cannot be written.
        CheckpointError: an address cannot be read or written, or has a run that is not resumed.
    """
    notes = []
    folders = {"OUTPUT_DIR": cfg.OUTPUT_DIR, "CHECKPOINT.DIR": checkpoint_dir(cfg)} if comm.is_main_process() else {}
    for key, folder in folders.items():
        try:
            own_folder(folder)
        except OSError as error:
            raise ConfigError(f"{key} {folder!r} cannot be written, choose another: {error}") from error
        if (mirror := mirrors.get(folder)) is not None and not mirror.is_taken:
            mirror.take(resume)
            notes.append(f"Files are written to {folder}, and uploaded to {mirror.address} after each save")
    return notes


def release_folders(cfg: CfgNode) -> None:
    """Unlock both folders. Raises CheckpointError if the run has no error, but not all its files are at its address."""
    folders = (cfg.OUTPUT_DIR, checkpoint_dir(cfg))
    errors = [error for folder in folders if (mirror := mirrors.get(folder)) and (error := mirror.release())]
    for folder in folders:
        release_folder(folder)
    if errors and sys.exc_info()[0] is None:
        raise CheckpointError(f"the run is at its end, but {'; '.join(errors)}; use --resume to upload them")


def default_setup(cfg: Any, args: Any) -> None:
    """Make the output folder, set up the log, log command and machine, write ``config.yaml``, seed everything.

    Every rank calls it. A new run moves the files of an earlier one into ``previous_<n>`` in the folder; a run that
    torchrun or SLURM has started again counts as resumed.

    Args:
        cfg: a config of `get_cfg`; or a node of a `LazyConfig` with ``train.output_dir``, in which ``train`` may have
            ``seed``, ``cudnn_benchmark``, ``init_checkpoint``; ``--num-gpus 0`` sets ``device``.
        args: has ``resume`` and ``eval_only`` if they are set, see `default_argument_parser`.

    Raises:
        ConfigError: a folder cannot be written, a setting is not accepted, or the script ignores an option.
    """
    check_is_ours(cfg)
    given, text = cfg, ""
    if not isinstance(cfg, CfgNode):
        cfg, text = _translate(cfg, args)
    look_for_requeue(local_folder(cfg.OUTPUT_DIR))
    resume, eval_only = getattr(args, "resume", False) or is_restarted(), getattr(args, "eval_only", False)
    when_ready = apply_options(given, args)
    _check_command(cfg, args)
    cfg.__dict__[_COMMAND] = Command(getattr(args, "resume", None), eval_only)
    text = text or cfg.dump()
    import_modules(cfg.IMPORTS)
    check_values(cfg)
    if getattr(args, "print_config", False):
        print(text if comm.is_main_process() else "", end="")
        sys.exit()
    use_local_folders(cfg)
    output_dir, checkpoints = Path(cfg.OUTPUT_DIR), Path(checkpoint_dir(cfg))
    notes = [] if eval_only else own_folders(cfg, resume)
    older: list[Path] = []
    if comm.is_main_process():
        for mirror in filter(None, map(mirrors.get, [cfg.OUTPUT_DIR, checkpoint_dir(cfg)] * eval_only)):
            mirror.download()
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            is_new = not eval_only and not (resume and _has_checkpoint(checkpoints))
            for folder in dict.fromkeys([output_dir, checkpoints]):
                if aside := _move_aside(folder, cfg.MODEL.WEIGHTS, is_new):
                    notes.append(f"The files of an earlier run in {folder} are now in {aside}")
            if resume and is_new:  # somebody may have forgotten --resume before
                older = sorted(checkpoints.glob("previous_*/last_checkpoint"), key=os.path.getmtime)
            if not eval_only:
                write_text(text, output_dir / "config.yaml")
        except OSError as error:
            raise ConfigError(f"OUTPUT_DIR {cfg.OUTPUT_DIR!r} cannot be written, choose another: {error}") from error
    if not eval_only:
        note_begin(cfg.OUTPUT_DIR)
    comm.synchronize()
    for call in when_ready:
        call()

    level = "WARNING" if getattr(args, "quiet", False) else cfg.LOG.LEVEL
    setup_logger(output_dir, distributed_rank=comm.get_rank(), stdout_level=level)
    logger.info("Rank %d of %d", comm.get_rank(), comm.get_world_size())
    logger.debug("Environment:\n%s", collect_env_info())
    logger.info("Command: %s", " ".join(sys.argv))
    if is_restarted() and not eval_only:
        logger.info("The run was restarted; it resumes from its last checkpoint, if there is one")
    changes = "\n".join(f"  {key}: {value!r}" for key, value in changed_settings(cfg, get_cfg()))
    logger.info("Configuration, as far as it differs from the defaults:\n%s", changes or "  nowhere")
    for note in notes:
        logger.info(note)
    for key, known in similar_keys(cfg, get_cfg()):
        logger.warning("%s is used as a new key, beside %s; correct it if you meant that one", key, known)
    if older:
        text = "There is no checkpoint in %s to resume, but in %s: to continue that run, name its folder in OUTPUT_DIR"
        logger.warning(text, checkpoints, older[-1].parent)
    seed_all_rng(None if cfg.SEED < 0 else (cfg.SEED + comm.get_rank()) % 2**32)  # NumPy takes 32 bits
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not eval_only
    if cfg.DETERMINISTIC:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        torch.use_deterministic_algorithms(True)
    if cfg.FLOAT32_PRECISION:
        torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)


def apply_options(cfg: Any, args: Any) -> list[Callable[[], None]]:
    """Apply the options of projects that are in ``args``; see `OPTIONS`. Call the results when OUTPUT_DIR is ready."""
    given = [option for option in OPTIONS if getattr(args, option.lstrip("-").replace("-", "_"), None)]
    results = [load_plugin(module).apply(cfg, args) for module in dict.fromkeys(OPTIONS[option] for option in given)]
    return [*filter(None, results)]


def _translate(cfg: Any, args: Any) -> tuple[CfgNode, str]:
    """The settings in a config of another type, and the text of its ``config.yaml``; see `CONFIG_TYPES`."""
    kind = type_name(cfg)
    if kind not in CONFIG_TYPES:
        raise ConfigError(f"cfg is a {kind}; accepted: a CfgNode of trainkit.config.get_cfg, {', '.join(CONFIG_TYPES)}")
    return load_plugin(CONFIG_TYPES[kind]).to_cfg(cfg, args)


def default_writers(
    output_dir: str | os.PathLike[str],
    max_iter: int | None = None,
    names: Sequence[str] = ("console", "json", "tensorboard"),
    window_size: int = 20,
    iters_per_epoch: int | None = None,
    *,
    cfg: CfgNode | None = None,
) -> list[events.EventWriter]:
    """Writers by name.

    Names: "console" (at most one line per second), "json" (``metrics.json``), "tensorboard" (skipped if the package is
    missing), and those of ``WRITER_REGISTRY``, such as "csv" and "progress_bar".

    Args:
        iters_per_epoch: None if there are no epochs.
        cfg: for registered writers that take it.

    Raises:
        ConfigError: another name, or the package that a writer needs is missing.
    """
    folder = Path(output_dir)
    makers: dict[str, Callable[[], events.EventWriter]] = {
        "console": lambda: events.CommonMetricPrinter(
            max_iter, window_size, iters_per_epoch=iters_per_epoch, min_interval_sec=1.0
        ),
        "json": lambda: events.JSONWriter(folder / "metrics.json", window_size),
        "tensorboard": lambda: events.TensorboardXWriter(folder, window_size),
    }
    for name in [name for name in names if name in events.WRITER_REGISTRY]:
        maker = events.WRITER_REGISTRY.get(name)
        also = {"cfg": cfg} if "cfg" in inspect.signature(maker).parameters else {}
        makers[name] = partial(maker, output_dir, window_size, **also)
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise ConfigError(
            f"there is no writer called {unknown[0]!r}; LOG.WRITERS takes {', '.join(makers)}, and names of "
            "WRITER_REGISTRY. A writer of your own: register it there, and name its module in IMPORTS"
        )
    if "tensorboard" in names and importlib.util.find_spec("tensorboard") is None:
        logger.info("Nothing is written for TensorBoard; to change that: pip install 'trainkit[tensorboard]'")
        names = [name for name in names if name != "tensorboard"]
    try:
        return [makers[name]() for name in names]
    except (ImportError, TypeError) as error:  # a package is missing, or a registered writer takes other arguments
        raise ConfigError(f"LOG.WRITERS cannot be built: {error}") from error


def _check_command(cfg: CfgNode, args: Any) -> None:
    """Check that the script follows ``--num-gpus``; ``--num-gpus 0`` is applied here."""
    if (num_gpus := getattr(args, "num_gpus", 1)) > comm.get_world_size():
        raise ConfigError(
            f"--num-gpus is {num_gpus}, but the number of processes is {comm.get_world_size()}; "
            "start them by trainkit.engine.launch, or leave --num-gpus out"
        )
    if num_gpus == 0:
        if cfg.MODEL.DEVICE not in ("auto", "cpu"):
            raise ConfigError(f"--num-gpus is 0, but MODEL.DEVICE is {cfg.MODEL.DEVICE!r}; leave one of them out")
        cfg.MODEL["DEVICE"] = "cpu"  # by item, since the config may be frozen


def _has_checkpoint(folder: Path) -> bool:
    try:
        return bool(find_checkpoint(str(folder)) or choose(candidates(str(folder)))[0])  # `choose` reads the files
    except CheckpointError:  # there is a checkpoint; its error is raised on all ranks when it is loaded
        return True


def _move_aside(output_dir: Path, weights: str, is_new: bool) -> Path | None:
    """Move the files of a run into a new folder ``previous_<n>``; return the folder, or None if there were no files.

    If the run continues, only links are moved, since the run would write through them to other folders.
    """
    found = [*output_dir.iterdir()] if output_dir.is_dir() else []
    # further files of a checkpoint before the file that names them
    old = [path for path in found if path.is_dir() and owner_of_part(path.name)]
    old += [path for path in found if (path.is_file() or path.is_symlink()) and _RUN_FILES.fullmatch(path.name)]
    if not is_new:
        old = [path for path in old if path.suffix != ".pth" and not is_file_of(str(output_dir), path.name)]
    if not old:
        return None
    if weights and Path(weights).resolve() in [path.resolve() for path in old]:
        raise ConfigError(
            f"MODEL.WEIGHTS {weights!r} lies in OUTPUT_DIR, which a new run empties first; give it another OUTPUT_DIR, "
            "or continue the old run with --resume"
        )
    n = 1
    while os.path.lexists(aside := output_dir / f"previous_{n}"):
        n += 1
    aside.mkdir()
    for path in old:
        path.rename(aside / path.name)
    return aside
