"""A sharded model: each rank holds a part of every parameter (``MODEL.PARALLEL: fsdp``)."""

import importlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainkit.projects.sharding.tensors import (
    is_sharded,
    local_part,
    release_gathered,
    shard_like,
    shard_optimizer_state,
)

from trainkit.config import CfgNode, ConfigError
from trainkit.engine.defaults.build import WRAPPER_REGISTRY, ModelBuilder
from trainkit.evaluation.evaluator import DatasetEvaluators
from trainkit.evaluation.observer import EvaluationAbandoned
from trainkit.utils import comm
from trainkit.utils.device import device_of, move_to_device, resolve_device
from trainkit.utils.env import get_rng_state, set_rng_state
from trainkit.utils.errors import not_accepted

logger = logging.getLogger(__name__)

_END: Any = object()


@WRAPPER_REGISTRY.register()
def fsdp(cfg: CfgNode, build: ModelBuilder) -> nn.Module:
    """``build(cfg)``, sharded by ``MODEL.FSDP``, with the weights of rank 0; every rank calls it. One process: whole.

    With ``MODEL.FSDP.META_INIT`` rank 0 builds the model in host memory, the other ranks on the meta device.

    With ``MODEL.TENSOR_PARALLEL`` above 1, ``parallelize_model(cfg, model, mesh)`` of the trainer is called before the
    model is sharded, and the random state of a group becomes that of its first rank. ``mesh`` is a ``DeviceMesh`` of
    all ranks. The method calls torch's ``parallelize_module(model, mesh["tp"], plan)`` and returns the model.

    Raises ConfigError: a name in BLOCKS matches no module; MESH does not fit the number of processes;
    ``parallelize_model`` distributes nothing; a parameter that modules share became several.
    """
    if comm.get_world_size() == 1:
        return build(cfg)
    options = cfg.MODEL.FSDP
    weights = None  # those of the model, if it has lost them
    if options.META_INIT:
        model, weights = _build_on_meta(cfg, build)
    else:
        model = build(cfg)
    device_type = resolve_device(cfg.MODEL.DEVICE).type
    mesh = _build_mesh(device_type, options.MESH)
    is_tensor_parallel = comm.get_data_group_size() > 1
    if is_tensor_parallel:
        weights = weights or _named_tensors(model)
        model = _parallelize(cfg, build, model, mesh)
    if options.BLOCKS:
        blocks = _blocks_of_classes(model, options.BLOCKS)
    else:
        blocks = blocks_of_lists(model)
    data_dims = tuple(name for name in mesh.mesh_dim_names if name != "tp")
    shard_model(
        model,
        blocks,
        device_type=device_type,
        mesh=mesh[data_dims],
        param_dtype=getattr(torch, options.PARAM_DTYPE, None),
        reduce_dtype=getattr(torch, options.REDUCE_DTYPE, None),
        reshard_after_forward=options.RESHARD_AFTER_FORWARD,
        weights=weights,
    )
    if is_tensor_parallel:
        group = mesh["tp"].get_group()
        of_first_rank = comm.all_gather(get_rng_state(), group=group)[0]
        set_rng_state(of_first_rank)
    return model


def _parallelize(cfg: CfgNode, build: ModelBuilder, model: nn.Module, mesh: Any) -> nn.Module:
    """Call ``parallelize_model`` of the trainer, and check what it has done; see `fsdp`."""
    shared = _shared(model)
    if hasattr(build.trainer, "parallelize_model"):
        model = build.trainer.parallelize_model(cfg, model, mesh)
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        raise ConfigError(
            f"MODEL.TENSOR_PARALLEL is {cfg.MODEL.TENSOR_PARALLEL}, but parallelize_model() "
            "has distributed no "
            "parameter; give your DefaultTrainer this class method, and call torch's "
            "parallelize_module there"
        )
    still_shared = _shared(model)
    separated = [" = ".join(names) for names in shared if names not in still_shared]
    if separated:
        raise ConfigError(
            f"{'; '.join(separated)}: one parameter became several, by parallelize_model()"
        )
    return model


def _blocks_of_classes(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    classes = {type(module).__name__ for module in model.modules()}
    if not classes >= {*names}:
        raise not_accepted("MODEL.FSDP.BLOCKS", names, ", ".join(sorted(classes)))
    return [module for module in model.modules() if type(module).__name__ in names]


def blocks_of_lists(model: nn.Module) -> list[nn.Module]:
    """The entries of ModuleLists: they are the blocks if MODEL.FSDP.BLOCKS names no classes."""
    blocks = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for entry in module:
                if not isinstance(entry, nn.ModuleList | nn.ModuleDict):
                    blocks.append(entry)
    return blocks


def _build_mesh(device_type: str, shape: Sequence[int]) -> Any:
    """A mesh of all ranks: "dp_replicate" and "dp_shard" of ``shape`` (only "dp_shard" if it is []), and "tp" if used.

    Raises ConfigError if the product of ``shape`` is not the number of data ranks.
    """
    num = comm.get_data_world_size()
    is_pair = len(shape) == 2 and min(shape) >= 1
    if shape and not (is_pair and math.prod(shape) == num):
        raise not_accepted(
            "MODEL.FSDP.MESH", [*shape], f"[replicate, shard] whose product is {num}, or []"
        )
    if shape:
        dims = {"dp_replicate": shape[0], "dp_shard": shape[1]}
    else:
        dims = {"dp_shard": num}
    if comm.get_data_group_size() > 1:
        dims["tp"] = comm.get_data_group_size()
    return dist.init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def shard_model(
    model: nn.Module,
    blocks: Collection[nn.Module] = (),
    *,
    device_type: str = "cpu",
    mesh: Any = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Call ``fully_shard`` for each block and the model, in place; every rank calls it, before building an optimizer.

    Parameters and buffers become those of rank 0.

    Args:
        mesh: the ranks; None: all. On a mesh with two dimensions, the model is replicated along the first.
        blocks: modules of the model; inner ones are sharded first.
        param_dtype: the dtype of forward and backward computation; None: that of the parameters.
        reduce_dtype: the dtype in which gradients are averaged; None: that of the computation.
        reshard_after_forward: release the gathered parameters of a block until the backward pass gathers them again.
            This needs half the memory and 1.5 times the traffic. Parameters outside of blocks stay gathered.
        weights: name -> tensor, on rank 0 of a model on the meta device.
    """
    fsdp = importlib.import_module("torch.distributed.fsdp")
    if mesh is None:
        mesh = _build_mesh(device_type, ())
    policy = fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    own = _named_tensors(model)
    # a module comes before the modules in it
    outer_first = [module for module in model.modules() if module in {*blocks} - {model}]
    blocks = outer_first[::-1]
    _refuse_parameters_of_two_blocks(model, blocks)
    for block in blocks:
        fsdp.fully_shard(
            block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    model.batches_of_all_ranks = MethodType(batches_of_all_ranks, model)  # type: ignore[assignment]
    model.optimizer_state_to_load = shard_optimizer_state
    if any(tensor.is_meta for tensor in own.values()):
        device = torch.cuda.current_device() if device_type == "cuda" else device_type
        model.to_empty(device=device)
    _take_from_rank_0(model, own if weights is None else weights)
    model.register_load_state_dict_pre_hook(_shard_weights)
    model.checkpoint_format = "shards"  # type: ignore[assignment]  # of a Checkpointer


def _shard_weights(model: nn.Module, state_dict: dict[str, Any], *args: Any) -> None:
    """Shard whole tensors like the model's own, before it loads them."""
    own = model.state_dict()
    for name, value in state_dict.items():
        state_dict[name] = shard_like(value, own.get(name))


@torch.no_grad()
def _take_from_rank_0(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy one tensor at a time, so that no rank needs memory for more than one full tensor."""
    for name, tensor in _named_tensors(model).items():
        if comm.is_main_process():
            whole = weights[name].to(tensor.device).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        dist.broadcast(whole, 0)
        if is_sharded(tensor):
            local_part(tensor).copy_(local_part(shard_like(whole, tensor)))
        else:
            tensor.copy_(whole)


def _build_on_meta(cfg: CfgNode, build: ModelBuilder) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model on the meta device; on rank 0 also its weights."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu" if comm.is_main_process() else "meta"
    cfg.freeze()
    with nullcontext() if comm.is_main_process() else torch.device("meta"):
        model = build(cfg)
    weights = _named_tensors(model) if comm.is_main_process() else {}
    shared = _shared(model)
    if shared:
        raise ConfigError(
            f"MODEL.FSDP.META_INIT would separate {shared[0]}, which are one; set it to False"
        )
    return model.to("meta"), weights


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def _refuse_parameters_of_two_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """``blocks``: inner ones first."""
    innermost_block: dict[nn.Module, nn.Module] = {}
    for block in blocks:
        for module in block.modules():
            innermost_block.setdefault(module, block)
    for names in _shared(model):
        owners = set()
        for name in names:
            path, _, _ = name.rpartition(".")
            owners.add(innermost_block.get(model.get_submodule(path)))
        if len(owners) > 1:
            raise ConfigError(
                f"{' = '.join(names)} is one parameter in different blocks; change "
                "MODEL.FSDP.BLOCKS"
            )


def _shared(model: nn.Module) -> list[list[str]]:
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [same for same in names.values() if len(same) > 1]


def batches_of_all_ranks(
    model: nn.Module,
    data_loader: Iterable[Any],
    evaluators: DatasetEvaluators,
    is_stopping: Callable[[], bool],
) -> Iterator[Any]:
    """The batches of this rank; a rank without a batch repeats one until all ranks are done.

    Of ranks that compute a batch together, only the first one evaluates it. `inference_on_dataset` calls this as a
    method of the model. An evaluator that runs the model too has a method ``keep_up(inputs)``, which runs it as often
    as ``process`` does. Raises EvaluationAbandoned, on every rank, if some rank is stopping.
    """
    device = device_of(model)
    own = iter(data_loader)
    last = _END  # the batch to repeat
    is_first_of_group = comm.get_rank() % comm.get_data_group_size() == 0
    while True:
        new = next(own, _END)
        by_rank = comm.all_gather((new is not _END, last is not _END, is_stopping()))
        ranks_with_new = [rank for rank, (has_new, _, _) in enumerate(by_rank) if has_new]
        is_any_stopping = any(stops for _, _, stops in by_rank)
        if is_any_stopping or not ranks_with_new:
            release_gathered(model)
        if is_any_stopping:
            raise EvaluationAbandoned("the evaluation was abandoned: the run is to stop")
        if not ranks_with_new:
            return
        have_all_a_batch = all(has_new or has_last for has_new, has_last, _ in by_rank)
        if not have_all_a_batch:  # a rank's part may be empty
            borrowed = comm.broadcast(new, src=ranks_with_new[0])
            if last is _END:
                last = borrowed
        if new is not _END:
            last = new
            if is_first_of_group:
                yield new
                continue
        inputs = last if device is None else move_to_device(last, device)
        model(inputs)
        _keep_up(evaluators, inputs)


def _keep_up(evaluator: Any, inputs: Any) -> None:
    if isinstance(evaluator, DatasetEvaluators):
        for part in evaluator.evaluators:
            _keep_up(part, inputs)
    if hasattr(evaluator, "keep_up"):
        evaluator.keep_up(inputs)
