"""What detectron2's users import from the modules that trainkit mirrors, with its parameters.

A name of this table takes the calls written for detectron2: the same parameters in the same places with the same
defaults, and others only if they may be left out. The others are the rows of a section of the guide, with the reason.
"""

import ast
import importlib
import inspect
import re
from operator import attrgetter

import pytest
import torch

from tests.docs.pages import page
from trainkit.engine.launch import DEFAULT_TIMEOUT

STEP = "model, data_loader, optimizer, gather_metric_period=1, zero_grad_before_forward=False"
WARMUP = "warmup_factor=0.001, warmup_iters=1000, warmup_method='linear', last_epoch=-1"
CFG_MODEL = "cfg, model"

# module: what it has; a name without parentheses is there, whatever it is; what starts with a dot belongs to the class
# before it; methods have their self
TABLE = f"""
checkpoint:
    Checkpointer(model, save_dir='', *, save_to_disk=True, **checkpointables) | .add_checkpointable(self, key,
    checkpointable) | .save(self, name, **kwargs) | .load(self, path, checkpointables=None) | .has_checkpoint(self) |
    .get_checkpoint_file(self) | .get_all_checkpoint_files(self) | .resume_or_load(self, path, *, resume=True) |
    .tag_last_checkpoint(self, last_filename_basename) | DetectionCheckpointer(model, save_dir='', *,
    save_to_disk=None, **checkpointables) | PeriodicCheckpointer(checkpointer, period, max_iter=None,
    max_to_keep=None, file_prefix='model') | .step(self, iteration, **kwargs) | .save(self, name, **kwargs)
config:
    CfgNode(init_dict=None, key_list=None, new_allowed=False) | .merge_from_file(self, cfg_filename,
    allow_unsafe=True) | .merge_from_list(self, cfg_list) | .merge_from_other_cfg(self, cfg_other) |
    .load_yaml_with_base(filename, allow_unsafe=False) | .dump(self, *args, **kwargs) | .clone(self) | .freeze(self) |
    .defrost(self) | .is_frozen(self) | LazyCall(target) | LazyConfig.apply_overrides(cfg, overrides) |
    .load(filename, keys=None) | .load_rel(filename, keys=None) | .save(cfg, filename) | .to_py(cfg, prefix='cfg.') |
    configurable(init_func=None, *, from_config=None) | downgrade_config(cfg, to_version) | get_cfg() | global_cfg |
    instantiate(cfg) | set_global_cfg(cfg) | upgrade_config(cfg, to_version=None)
config.instantiate:
    dump_dataclass(obj) | instantiate(cfg)
data:
    DatasetCatalog | DatasetFromList | MapDataset | Metadata | MetadataCatalog | ToIterableDataset |
    build_batch_data_loader
data.build:
    build_batch_data_loader(dataset, sampler, total_batch_size, *, aspect_ratio_grouping=False, num_workers=0,
    collate_fn=None, drop_last=True, single_gpu_batch_size=None, prefetch_factor=2, persistent_workers=False,
    pin_memory=False, seed=None, **kwargs) | trivial_batch_collator(batch) | worker_init_reset_seed(worker_id)
data.catalog:
    DatasetCatalog.get(name) | .list() | .pop | .register(name, func) | .remove(name) | Metadata(**kwargs) |
    .as_dict(self) | .get(self, key, default=None) | .name | .set(self, **kwargs) | MetadataCatalog.get(name) |
    .list() | .pop | .remove(name)
data.common:
    AspectRatioGroupedDataset(dataset, batch_size) | DatasetFromList(lst, copy=True, serialize=True) |
    MapDataset(dataset, map_func) | ToIterableDataset(dataset, sampler, shard_sampler=True, shard_chunk_size=1) |
    set_default_dataset_from_list_serialize_method(new)
data.samplers:
    GroupedBatchSampler(sampler, group_ids, batch_size) | InferenceSampler(size) | ._get_local_indices(total_size,
    world_size, rank) | RandomSubsetTrainingSampler(size, subset_ratio, shuffle=True, seed_shuffle=None,
    seed_subset=None) | RepeatFactorTrainingSampler(repeat_factors, *, shuffle=True, seed=None) |
    .repeat_factors_from_category_frequency(dataset_dicts, repeat_thresh, sqrt=True) | TrainingSampler(size,
    shuffle=True, seed=None) | ._infinite_indices(self)
engine:
    AMPTrainer | AutogradProfiler | BestCheckpointer | CallbackHook | DEFAULT_TIMEOUT | DefaultPredictor |
    DefaultTrainer | EvalHook | HookBase | IterationTimer | LRScheduler | PeriodicCheckpointer | PeriodicWriter |
    PreciseBN | SimpleTrainer | TorchMemoryStats | TorchProfiler | TrainerBase | create_ddp_model |
    default_argument_parser | default_setup | default_writers | hooks | launch
engine.defaults:
    DefaultPredictor(cfg) | DefaultTrainer(cfg) | .auto_scale_workers(cfg, num_workers) | .build_evaluator(cfg,
    dataset_name) | .build_hooks(self) | .build_lr_scheduler(cfg, optimizer) | .build_model(cfg) |
    .build_optimizer({CFG_MODEL}) | .build_test_loader(cfg, dataset_name) | .build_train_loader(cfg) |
    .build_writers(self) | .resume_or_load(self, resume=True) | .run_step(self) | .test({CFG_MODEL}, evaluators=None)
    | .train(self) | create_ddp_model(model, *, fp16_compression=False, **kwargs) |
    default_argument_parser(epilog=None) | default_setup(cfg, args) | default_writers(output_dir, max_iter=None)
engine.hooks:
    AutogradProfiler(enable_predicate, output_dir, *, use_cuda=True) | BestCheckpointer(eval_period, checkpointer,
    val_metric, mode='max', file_prefix='model_best') | CallbackHook(*, before_train=None, after_train=None,
    before_step=None, after_step=None) | EvalHook(eval_period, eval_function, eval_after_train=True) | ._do_eval(self)
    | IterationTimer(warmup_iter=3) | LRScheduler(optimizer=None, scheduler=None) |
    .get_best_param_group_id(optimizer) | .scheduler | PeriodicCheckpointer(checkpointer, period, max_iter=None,
    max_to_keep=None, file_prefix='model') | PeriodicWriter(writers, period=20) | PreciseBN(period, model,
    data_loader, num_iter) | .update_stats(self) | TorchMemoryStats(period=20, max_runs=10) |
    TorchProfiler(enable_predicate, output_dir, *, activities=None, save_tensorboard=True)
engine.launch:
    DEFAULT_TIMEOUT | launch(main_func, num_gpus_per_machine, num_machines=1, machine_rank=0, dist_url=None, args=(),
    timeout=DEFAULT_TIMEOUT)
engine.train_loop:
    AMPTrainer({STEP}, grad_scaler=None, precision=torch.float16, log_grad_scaler=False, async_write_metrics=False) |
    HookBase() | .after_backward(self) | .after_step(self) | .after_train(self) | .before_step(self) |
    .before_train(self) | .state_dict(self) | .trainer | SimpleTrainer({STEP}, async_write_metrics=False) |
    ._write_metrics(self, loss_dict, data_time, prefix='', iter=None) | .reset_data_loader | .run_step(self) |
    .write_metrics(loss_dict, data_time, cur_iter, prefix='') | TrainerBase() | .after_backward(self) |
    .after_step(self) | .after_train(self) | .before_step(self) | .before_train(self) | .load_state_dict(self,
    state_dict) | .register_hooks(self, hooks) | .run_step(self) | .state_dict(self) | .train(self, start_iter,
    max_iter)
evaluation:
    DatasetEvaluator | DatasetEvaluators | inference_context | inference_on_dataset | print_csv_format |
    verify_results
evaluation.evaluator:
    DatasetEvaluator() | .evaluate(self) | .process(self, inputs, outputs) | .reset(self) |
    DatasetEvaluators(evaluators) | inference_context(model) | inference_on_dataset(model, data_loader, evaluator,
    callbacks=None)
evaluation.testing:
    flatten_results_dict(results) | print_csv_format(results) | verify_results(cfg, results)
solver:
    LRMultiplier | LRScheduler | WarmupCosineLR | WarmupMultiStepLR | WarmupParamScheduler | build_lr_scheduler |
    build_optimizer | get_default_optimizer_params
solver.build:
    GradientClipType | build_lr_scheduler(cfg, optimizer) | build_optimizer({CFG_MODEL}) |
    get_default_optimizer_params(model, base_lr=None, weight_decay=None, weight_decay_norm=None, bias_lr_factor=1.0,
    weight_decay_bias=None, lr_factor_func=None, overrides=None) | maybe_add_gradient_clipping(cfg, optimizer) |
    reduce_param_groups(params)
solver.lr_scheduler:
    LRMultiplier(optimizer, multiplier, max_iter, last_iter=-1) | LRScheduler | WarmupCosineLR(optimizer, max_iters,
    {WARMUP}) | WarmupMultiStepLR(optimizer, milestones, gamma=0.1, {WARMUP}) | WarmupParamScheduler(scheduler,
    warmup_factor, warmup_length, warmup_method='linear', rescale_interval=False) | _get_warmup_factor_at_iter(method,
    iter, warmup_iters, warmup_factor)
utils.collect_env:
    collect_env_info()
utils.comm:
    all_gather(data, group=None) | create_local_process_group(num_workers_per_machine) | gather(data, dst=0,
    group=None) | get_local_process_group() | get_local_rank() | get_local_size() | get_rank() | get_world_size() |
    is_main_process() | reduce_dict(input_dict, average=True) | shared_random_seed() | synchronize()
utils.env:
    TORCH_VERSION | fixup_module_metadata(module_name, namespace, keys=None) | seed_all_rng(seed=None) |
    setup_custom_environment(custom_module) | setup_environment()
utils.events:
    CommonMetricPrinter(max_iter=None, window_size=20) | EventStorage(start_iter=0) | ._vis_data |
    .clear_histograms(self) | .clear_images(self) | .count_samples(self, name, window_size=20) | .histories(self) |
    .history(self, name) | .iter | .iteration | .latest(self) | .latest_with_smoothing_hint(self, window_size=20) |
    .name_scope(self, name) | .put_histogram(self, hist_name, hist_tensor, bins=1000) | .put_image(self, img_name,
    img_tensor) | .put_scalar(self, name, value, smoothing_hint=True, cur_iter=None) | .put_scalars(self, *,
    smoothing_hint=True, cur_iter=None, **kwargs) | .smoothing_hints(self) | .step(self) | EventWriter() |
    .close(self) | .write(self) | JSONWriter(json_file, window_size=20) | TensorboardXWriter(log_dir, window_size=20,
    **kwargs) | ._writer | get_event_storage() | has_event_storage()
utils.file_io:
    PathHandler | PathManager
utils.logger:
    _log_api_usage(identifier) | create_small_table(small_dict) | log_every_n(lvl, msg, n=1, *, name=None) |
    log_every_n_seconds(lvl, msg, n=1, *, name=None) | log_first_n(lvl, msg, n=1, *, name=None, key='caller') |
    setup_logger(output=None, distributed_rank=0, *, color=True, name='detectron2', abbrev_name=None,
    enable_propagation=False, configure_stdout=True)
utils.memory:
    retry_if_cuda_oom(func)
utils.registry:
    Registry(name) | .get(self, name) | .register(self, obj=None) | _convert_target_to_string(t) | locate(name)
utils.serialize:
    PicklableWrapper(obj)
utils.testing:
    reload_lazy_config(cfg) | reload_script_model(module) | skipIfOnCPUCI
"""


def entries(table):
    """(module, what it has)"""
    for section in re.split(r"\n(?=\S)", table.strip()):
        module, _, text = section.partition(":")
        owner = ""
        for entry in (" ".join(entry.split()) for entry in text.split("|")):
            owner = owner if entry.startswith(".") else re.split(r"[.(]", entry)[0]
            yield module, f"{owner}{entry}" if entry.startswith(".") else entry


def find_difference(module, entry):
    """Why a use of this name written for detectron2 would not be the same here; None if it would."""
    name, parenthesis, _ = entry.partition("(")
    try:
        ours = attrgetter(name)(importlib.import_module(f"trainkit.{module}"))
    except (AttributeError, ModuleNotFoundError):
        return "is missing"
    return (
        compare(entry.replace(".", "_", name.count(".")), inspect.signature(ours))
        if parenthesis
        else None
    )


def compare(theirs, ours):
    args = ast.parse(f"def {theirs}: ...").body[0].args
    positional = [
        parameter
        for parameter in ours.parameters.values()
        if parameter.kind < inspect.Parameter.VAR_POSITIONAL
    ]
    named = {
        name: p for name, p in ours.parameters.items() if p.kind < inspect.Parameter.VAR_KEYWORD
    }
    kinds = {parameter.kind for parameter in ours.parameters.values()}
    no_default = [None] * (len(args.args) - len(args.defaults))
    for i, (arg, default) in enumerate(zip(args.args, [*no_default, *args.defaults], strict=True)):
        if i >= len(positional) or positional[i].name != arg.arg:
            return f"does not take {arg.arg} at place {i}"
        if has_other_default(positional[i], default):
            return f"has another default of {arg.arg}"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        if arg.arg not in named:
            return f"does not take {arg.arg}"
        if has_other_default(named[arg.arg], default):
            return f"has another default of {arg.arg}"
    known = {arg.arg for arg in [*args.args, *args.kwonlyargs]}
    if any(
        p.default is p.empty and p.kind is not p.VAR_POSITIONAL
        for name, p in named.items()
        if name not in known
    ):
        return "needs another argument"
    if args.vararg and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return "takes no further arguments by position"
    if args.kwarg and inspect.Parameter.VAR_KEYWORD not in kinds:
        return "takes no further arguments by name"
    return None


def has_other_default(parameter, source):
    """One that must be given there may be left out here."""
    if source is None:
        return False
    theirs = eval(ast.unparse(source), {"torch": torch, "DEFAULT_TIMEOUT": DEFAULT_TIMEOUT})
    return parameter.default is parameter.empty or parameter.default != theirs


def test_a_name_is_as_in_detectron2_or_in_the_guide_with_the_reason():
    found = {
        f"{module}.{entry.partition('(')[0]}": find_difference(module, entry)
        for module, entry in entries(TABLE)
    }
    section = (
        page("docs/migrate_from_detectron2.md")
        .partition("## Deliberately different\n")[2]
        .partition("\n## ")[0]
    )
    listed = dict(re.findall(r"^\| `([\w.]+)` \| (.+) \|$", section, flags=re.MULTILINE))
    assert len(found) > 200
    assert {
        name: difference for name, difference in found.items() if difference and name not in listed
    } == {}
    # neither names that are the same nor others
    assert [name for name in listed if not found.get(name)] == []


@pytest.mark.parametrize(
    ("ours", "difference"),
    [
        (lambda a=0, b=1, d=3, *, c=2, e=4, **rest: None, None),
        (lambda b, a=1, *, c=2, **rest: None, "does not take a at place 0"),
        (lambda a, b, *, c=2, **rest: None, "has another default of b"),
        (lambda a, b=1, *, c=3, **rest: None, "has another default of c"),
        (lambda a, b=1, **rest: None, "does not take c"),
        (lambda a, b=1, *, c=2, d, **rest: None, "needs another argument"),
        (lambda a, b=1, *, c=2: None, "takes no further arguments by name"),
    ],
)
def test_a_difference_is_found(ours, difference):
    assert compare("f(a, b=1, *, c=2, **rest)", inspect.signature(ours)) == difference
