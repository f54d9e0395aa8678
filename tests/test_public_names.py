"""The public names. Whoever changes one changes it here too, and in the CHANGELOG."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.utils.plugins import lent_names

ROOT = Path(__file__).parent.parent

# not capabilities
JOBS = [
    "charlm",
    "digits",
    "segmentation",
    "selfsup",
    "trainkit_selfsup",
    "vision_text",
]

PUBLIC = {
    "trainkit.checkpoint": {
        *(
            "Checkpointer",
            "CheckpointError",
            "CheckpointFormat",
            "CheckpointStore",
            "FORMAT_REGISTRY",
        ),
        *("load_trusted_pickle", "PeriodicCheckpointer", "STORE_REGISTRY"),
    },
    "trainkit.config": {
        *(
            "CfgNode",
            "check_values",
            "choose",
            "ConfigError",
            "configurable",
            "Epochs",
            "get_cfg",
            "global_cfg",
        ),
        *(
            "import_modules",
            "instantiate",
            "LazyCall",
            "LazyConfig",
            "LENGTH_KEYS",
            "parse_length",
            "prepare_projects",
        ),
        *("resolve_lengths", "scale_lr_to_batch", "scale_workers", "set_global_cfg"),
    },
    "trainkit.data": {
        *(
            "build_batch_data_loader",
            "build_test_loader",
            "build_train_loader",
            "build_transform",
            "CombinedLoader",
        ),
        *(
            "DatasetCatalog",
            "DatasetFromList",
            "GroupedBatchSampler",
            "InferenceSampler",
            "InfiniteSampler",
        ),
        *(
            "batches_per_epoch",
            "MapDataset",
            "Metadata",
            "MetadataCatalog",
            "RandomSubsetTrainingSampler",
        ),
        *(
            "RepeatFactorTrainingSampler",
            "ResumableLoader",
            "resume_obstacle",
            "SAMPLER_REGISTRY",
            "ToIterableDataset",
        ),
        *(
            "TrainingSampler",
            "TRANSFORM_REGISTRY",
            "trivial_batch_collator",
            "worker_init_reset_seed",
        ),
    },
    "trainkit.data.samplers": {
        "GroupedBatchSampler",
        "InferenceSampler",
        "InfiniteSampler",
        "RandomSubsetTrainingSampler",
        "RepeatFactorTrainingSampler",
        "TrainingSampler",
    },
    "trainkit.engine": {
        *(
            "AMPTrainer",
            "create_ddp_model",
            "default_argument_parser",
            "default_setup",
            "DEFAULT_TIMEOUT",
        ),
        *(
            "default_writers",
            "DefaultPredictor",
            "DefaultTrainer",
            "EvaluationRun",
            "fast_dev_config",
        ),
        *(
            "GraphAMPTrainer",
            "GraphTrainer",
            "HookBase",
            "hooks",
            "is_restarted",
            "launch",
            "Priority",
            "run",
        ),
        *("SimpleTrainer", "TrainerBase", "user_errors_exit"),
    },
    "trainkit.engine.hooks": {
        *(
            "AccumulationSchedule",
            "AutogradProfiler",
            "BestCheckpointer",
            "BestCheckpoints",
            "CallbackHook",
        ),
        *(
            "check_number",
            "check_period",
            "CheckFiniteLoss",
            "CopyAhead",
            "EarlyStopping",
            "EMAHook",
            "EmptyCache",
        ),
        *(
            "EvalHook",
            "FinalEvalHook",
            "Freeze",
            "GarbageCollection",
            "GradNorm",
            "HOOK_REGISTRY",
            "HookBase",
        ),
        *(
            "is_due",
            "is_due_epoch",
            "is_last",
            "is_nth",
            "IterationTimer",
            "LRScheduler",
            "MemorySnapshot",
        ),
        *(
            "ParamScheduler",
            "PeriodicCheckpointer",
            "PeriodicWriter",
            "PreciseBN",
            "Priority",
            "PublishWeights",
        ),
        *(
            "ReduceOnPlateau",
            "RuntimeInfo",
            "SamplerSeed",
            "SyncBuffers",
            "Throughput",
            "TimeLimit",
        ),
        *(
            "TorchMemoryStats",
            "TorchProfiler",
            "UnusedParameters",
            "VisualizationHook",
            "VISUALIZER_REGISTRY",
        ),
    },
    "trainkit.evaluation": {
        *(
            "build_evaluator",
            "ClassificationEvaluator",
            "DatasetEvaluator",
            "DatasetEvaluators",
            "EVALUATOR_REGISTRY",
        ),
        *(
            "flatten_results_dict",
            "inference_context",
            "inference_on_dataset",
            "LossEvaluator",
            "observe_inference",
        ),
        *("print_csv_format", "SemSegEvaluator", "verify_results"),
    },
    "trainkit.solver": {
        *(
            "build_gradient_clipper",
            "build_layer_decay",
            "build_lr_scheduler",
            "build_optimizer",
            "build_param_groups",
        ),
        *(
            "build_schedule",
            "CombinedOptimizer",
            "describe_param_groups",
            "get_default_optimizer_params",
        ),
        *("GradientClipper", "GradientClipType", "KeepLastValue", "LARS", "LAYER_DEPTH_REGISTRY"),
        *(
            "LR_SCHEDULER_BUILDER_REGISTRY",
            "LRFunction",
            "LRMultiplier",
            "maybe_add_gradient_clipping",
        ),
        *("OPTIMIZER_BUILDER_REGISTRY", "OPTIMIZER_REGISTRY", "PARAM_GROUP_REGISTRY", "ParamRules"),
        *(
            "reduce_param_groups",
            "SCHEDULE_REGISTRY",
            "ScheduledLR",
            "schedules",
            "start_momentum",
            "WarmupCosineLR",
        ),
        *("WarmupMultiStepLR", "WarmupParamScheduler"),
    },
    "trainkit.utils.events": {
        *(
            "CommonMetricPrinter",
            "CSVWriter",
            "estimate_eta_sec",
            "EventStorage",
            "EventWriter",
            "get_event_storage",
        ),
        *(
            "has_event_storage",
            "HistoryBuffer",
            "JSONWriter",
            "MLflowWriter",
            "ProgressBar",
            "TensorboardXWriter",
        ),
        *("WandbWriter", "WRITER_REGISTRY"),
    },
    "trainkit.testing": {"assert_resumes_exactly", "assert_same_on_any_workers"},
    "trainkit.projects.replay": {"replay", "Replay", "replay_range"},
    "trainkit_selfsup": {
        "DeepClusterHook",
        "DenseCLHook",
        "ODCHook",
        "ODCMemory",
        "SimSiamHook",
        "SwAVHook",
    },
}


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_of_a_package_are_these_and_exist(package):
    module = importlib.import_module(package)
    lent = set(lent_names(package))
    if package == "trainkit.engine":
        lent -= PUBLIC["trainkit.engine.hooks"]  # from here too, as in detectron2
    assert len(module.__all__) == len(set(module.__all__))
    assert {*module.__all__} | lent == PUBLIC[package]
    assert PUBLIC[package] <= {*dir(module)}
    assert [name for name in PUBLIC[package] if not hasattr(module, name)] == []


def imported(file):
    """Module and name of each ``from trainkit... import ...``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainkit"):
            yield from ((node.module, name.name) for name in node.names)


def test_jobs_use_what_is_public_or_on_the_pages_of_the_reference():
    """Modules of ``trainkit.utils`` have pages; what else is public says a package's ``__all__``."""
    documented = re.findall(
        r"auto(?:module|function):: (trainkit\.utils\.\w+)",
        (ROOT / "docs/api/utils.rst").read_text(),
    )
    documented += ["trainkit", "trainkit.modeling", "trainkit.utils", "trainkit.utils.comm"]
    files = [file for job in JOBS for file in (ROOT / "projects" / job).rglob("*.py")]
    found = {entry for file in files for entry in imported(file)}
    private = [
        (module, name)
        for module, name in found
        if not module.startswith("trainkit_selfsup.")  # of the same repository
        and module not in documented
        and name not in PUBLIC.get(module, ())
    ]
    assert ("trainkit.engine.hooks", "check_period") in found
    assert sorted(private) == []


MODULES = """
import sys, trainkit.engine, tools.plain_train_net, tools.train_net
print(*{name.split('.')[0] for name in sys.modules})
before = {*sys.modules}
trainkit.config.get_cfg()
print(*{name for name in {*sys.modules} - before if name.startswith('trainkit.')})
"""


def test_importing_takes_no_optional_or_slow_package_and_warns_of_nothing():
    """The modules of projects are imported when they are needed; a config needs only their plug-ins."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", MODULES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0
    assert run.stderr == ""
    unwanted = {
        "tensorboard",
        "matplotlib",
        "omegaconf",
        "hydra",
        "sklearn",
        "scipy",
        "PIL",
        "pandas",
    }
    unwanted |= {"wandb", "mlflow"}
    packages, of_projects = run.stdout.splitlines()
    assert unwanted & set(packages.split()) == set()
    found = set(of_projects.split())
    plugins = {name for name in found if name.endswith(".plugin")}
    folders = {path.parent.name for path in ROOT.glob("projects/*/plugin.py")}
    assert plugins == {f"trainkit.projects.{folder}.plugin" for folder in folders}
    assert found - plugins - {"trainkit.projects"} == {
        f"trainkit.projects.{folder}" for folder in folders
    }
