"""What this project brings to trainkit: ``MODEL.PARALLEL: fsdp``, its keys, and its checkpoints."""

from trainkit.config import CfgNode, ConfigError
from trainkit.config.checks import check_accepted
from trainkit.utils import comm

NAMES = {
    "shards": "trainkit.projects.sharding.format",
    "fsdp": "trainkit.projects.sharding.fsdp",
    "release_gathered": "trainkit.projects.sharding.tensors",
    "shard_like": "trainkit.projects.sharding.tensors",
}
FORMATS = ["shards"]

_DTYPES = ("", "float32", "float16", "bfloat16")


def add_config(cfg: CfgNode) -> None:
    # How many ranks compute a batch together, by parallelize_model() of your trainer.
    cfg.MODEL.TENSOR_PARALLEL = 1
    # torch's fully_shard.
    cfg.MODEL.FSDP = CfgNode()
    # Classes of modules to gather as units, such as ["Block"]. []: those of ModuleLists.
    cfg.MODEL.FSDP.BLOCKS = []
    # [2, 4]: two groups of 4 ranks; each group shards the model. []: one group.
    cfg.MODEL.FSDP.MESH = []
    # Of the computation: "bfloat16", "float16", "float32". "": as the parameters.
    cfg.MODEL.FSDP.PARAM_DTYPE = ""
    # The dtype in which gradients are averaged. "": as the computation.
    cfg.MODEL.FSDP.REDUCE_DTYPE = ""
    # False: needs more memory, but exchanges less data.
    cfg.MODEL.FSDP.RESHARD_AFTER_FORWARD = True
    # True: only rank 0 builds the weights, in host memory, and sends them to all.
    cfg.MODEL.FSDP.META_INIT = False


def check(cfg: CfgNode) -> None:
    if cfg.MODEL.PARALLEL == "fsdp":
        dtypes = "MODEL.FSDP.PARAM_DTYPE MODEL.FSDP.REDUCE_DTYPE"
        check_accepted(cfg, {_DTYPES: dtypes, "[1, inf)": "MODEL.FSDP.MESH"})
    check_accepted(cfg, {"[1, inf)": "MODEL.TENSOR_PARALLEL"})
    size = cfg.MODEL.TENSOR_PARALLEL
    world_size = comm.get_world_size()
    is_divisor = world_size == 1 or world_size % size == 0
    can_be_parallel = cfg.MODEL.PARALLEL == "fsdp" and is_divisor
    if size > 1 and not can_be_parallel:
        raise ConfigError(
            f"MODEL.TENSOR_PARALLEL is {size}, MODEL.PARALLEL is {cfg.MODEL.PARALLEL}, and the "
            f"number of processes is {world_size}; accepted: with MODEL.PARALLEL fsdp, a divisor "
            "of the number of processes; else 1"
        )


def prepare(cfg: CfgNode) -> None:
    """The ranks of a tensor-parallel group get the same data."""
    size = cfg.MODEL.TENSOR_PARALLEL
    if size > 1 and comm.get_world_size() > 1:
        comm.set_data_ranks(comm.get_rank() // size, comm.get_world_size() // size)
