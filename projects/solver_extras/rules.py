"""Parameter groups: factors of learning rates and weight decays by kind and name, and what the groups are."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from trainkit.projects.solver_extras.layer_decay import build_layer_decay, names_of_parameters

from trainkit.config import CfgNode, ConfigError
from trainkit.solver.build import PARAM_GROUP_REGISTRY, collect_arguments
from trainkit.solver.param_groups import (
    NORM_LAYERS,
    is_bias,
    reduce_param_groups,
    warn_of_missed_biases,
)
from trainkit.utils.errors import not_accepted
from trainkit.utils.logger import format_table
from trainkit.utils.periods import check_number

_logger = logging.getLogger(__name__)

ParamKind = Literal["norm", "bias", "dwconv", "embedding", "flat"]
"""The kind of a parameter; see ``ParamRules``."""


@dataclass(frozen=True)
class ParamRules:
    """Factors of the learning rate and weight decay of each parameter, and further options of its group.

    The factors of a parameter's kind, of its custom key and of ``lr_factor_func`` are multiplied. A parameter may be of
    several kinds; only the first kind in this order that has a factor counts:

    - ``norm``: weight or bias of a norm layer of ``torch.nn`` or of a subclass
    - ``bias``: a parameter named ``bias``, with ``all_biases`` also others; for the bias of a norm layer,
      ``lr_factors`` of this kind never count
    - ``dwconv``: a parameter of a convolution with as many groups as input channels (depth-wise)
    - ``embedding``: a parameter of an ``nn.Embedding`` or ``nn.EmbeddingBag``
    - ``flat``: a parameter with one dimension

    A shared parameter is of the kinds of all modules that have it; for the rules by name its first name counts.

    Args:
        weight_decay_norm, weight_decay_bias: base weight decay of parameters of norm layers, and of those named
            ``bias`` (this one wins); None: the common weight decay.
        bias_lr_factor: for every parameter named ``bias``, in addition to the factor of its kind.
        lr_factors, decay_factors: kind -> factor; a factor of 1, too, hides the factors of later kinds.
        custom_keys: part of a parameter's full name -> ``lr_factor``, ``decay_factor``, and further options, such as
            ``lars_exclude`` or ``momentum``, which are copied into its group.
        key_match: which matching key counts. ``longest``: the longest key (of equal length, the alphabetically first).
            ``shortest``: the opposite, as in MMSelfSup's layer decay. For both, the name of a parameter of the model
            itself starts with a dot, ``.pos_embed``, as in OpenMMLab. ``exact``: a key must be the whole name, as in
            MMSegmentation's layer decay: its key ``pos_embed`` does not match ``backbone.pos_embed``.
        custom_keys_only: a custom key switches off all other rules for its parameters, as in OpenMMLab.
        lr_factor_func: takes a parameter's full name, such as ``backbone.conv1.weight``; see `build_layer_decay`.
        all_biases: also biases with other names are of the kind ``bias``, see `trainkit.solver.param_groups.is_bias`.
            Without it they are named in a warning.

    Raises ValueError: a kind, a factor, a key or ``key_match`` is not accepted.
    """

    weight_decay_norm: float | None = None
    weight_decay_bias: float | None = None
    bias_lr_factor: float = 1.0
    lr_factors: Mapping[ParamKind, float] = field(default_factory=dict)
    decay_factors: Mapping[ParamKind, float] = field(default_factory=dict)
    custom_keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    key_match: Literal["longest", "shortest", "exact"] = "longest"
    custom_keys_only: bool = False
    lr_factor_func: Callable[[str], float] | None = None
    all_biases: bool = False

    def __post_init__(self) -> None:
        if self.key_match not in ("longest", "shortest", "exact"):
            raise ValueError(
                f"key_match must be one of longest, shortest, exact, got {self.key_match!r}"
            )
        kinds = get_args(ParamKind)
        unknown = {*self.lr_factors, *self.decay_factors} - {*kinds}
        if unknown:
            raise ValueError(f"{sorted(unknown)} are no kinds; accepted: {', '.join(kinds)}")
        tables: dict[str, Mapping[Any, Any]] = {
            "lr_factors": self.lr_factors,
            "decay_factors": self.decay_factors,
        }
        for key, options in self.custom_keys.items():
            wrong = options.keys() & {"params", "lr", "lr_mult", "weight_decay", "decay_mult"}
            if wrong:
                raise ValueError(
                    f"{key!r} in custom_keys takes lr_factor and decay_factor, got {sorted(wrong)}"
                )
            own = options.keys() & {"lr_factor", "decay_factor"}
            tables[f"custom_keys[{key!r}]"] = {name: options[name] for name in own}
        for where, factors in tables.items():
            for name, factor in factors.items():
                check_number(f"{name} in {where}", factor, "[0, inf)")

    def key_of(self, full_name: str) -> str | None:
        """The custom key that counts for a parameter; None if no key matches."""
        if self.key_match == "exact":
            return full_name if full_name in self.custom_keys else None
        dotted = full_name if "." in full_name else f".{full_name}"
        matching = [key for key in self.custom_keys if key in dotted]
        if not matching:
            return None
        longest_first = sorted(matching, key=lambda key: (-len(key), key))
        return longest_first[0] if self.key_match == "longest" else longest_first[-1]


def build_param_groups(
    model: nn.Module, base_lr: float, weight_decay: float | None, rules: ParamRules
) -> list[dict[str, Any]]:
    """Put the trainable parameters of a model into as few groups for an optimizer as possible.

    Frozen parameters are left out; a shared parameter is listed once, under its first name. The same model and
    arguments give the same groups in the same order, so that a run can resume. A warning names custom keys and factors
    that no parameter has. ``weight_decay``: None leaves the value to the optimizer; the rules for it then have no
    effect.
    """
    named_params = dict(model.named_parameters())
    used = {rules.key_of(name) for name in named_params}
    unused = sorted({*rules.custom_keys} - used)
    if unused:
        text = "Custom keys that match no parameter and have no effect: %s"
        _logger.warning(text, ", ".join(unused))
    kinds_of = _kinds_by_name(model, rules)
    _warn_of_rules_without_effect(model, rules, [*kinds_of.values()], weight_decay)
    groups = []
    for name, param in named_params.items():
        if param.requires_grad:
            options = _hyperparams(name, kinds_of[name], base_lr, weight_decay, rules)
            groups.append({"params": [param], **options})
    return reduce_param_groups(groups)


def _kinds_by_name(model: nn.Module, rules: ParamRules) -> dict[str, list[ParamKind]]:
    """The kinds of each parameter by its first name; none if a custom key switches them off."""
    # a module is not found if the model renames its parameters
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds_of: dict[str, list[ParamKind]] = {}
    for param, names in names_of_parameters(model).items():
        found: set[ParamKind] = set()
        is_switched_off = rules.custom_keys_only and rules.key_of(names[0]) is not None
        if not is_switched_off:
            for name in names:
                owner, _, _ = name.rpartition(".")
                found.update(_kinds(modules.get(owner), name, param, rules.all_biases))
        kinds_of[names[0]] = [kind for kind in get_args(ParamKind) if kind in found]
    return kinds_of


def _kind_of_decay(kinds: Iterable[ParamKind], rules: ParamRules) -> ParamKind | None:
    """The kind whose factor of the weight decay counts."""
    for kind in kinds:
        if kind in rules.decay_factors:
            return kind
    return None


def _kind_of_lr(kinds: Iterable[ParamKind], rules: ParamRules) -> ParamKind | None:
    """The kind whose factor of the learning rate counts."""
    kinds = [*kinds]
    if kinds[:2] == ["norm", "bias"]:
        kinds.remove("bias")
    for kind in kinds:
        if kind in rules.lr_factors:
            return kind
    return None


def _warn_of_rules_without_effect(
    model: nn.Module,
    rules: ParamRules,
    kinds_of_all: Sequence[Sequence[ParamKind]],
    decay: float | None,
) -> None:
    lr_kinds = {_kind_of_lr(kinds, rules) for kinds in kinds_of_all}
    decay_kinds: set[ParamKind | None] = set()
    if decay is not None:
        decay_kinds = {_kind_of_decay(kinds, rules) for kinds in kinds_of_all}
    unused = [f"{kind} of lr_factors" for kind in rules.lr_factors if kind not in lr_kinds]
    for kind in rules.decay_factors:
        if kind not in decay_kinds:
            unused.append(f"{kind} of decay_factors")
    if unused:
        text = "Factors that count for no parameter and have no effect: %s"
        _logger.warning(text, ", ".join(unused))
    has_rule = rules.bias_lr_factor != 1.0 or rules.weight_decay_bias not in (None, decay)
    has_factor = "bias" in rules.lr_factors or "bias" in rules.decay_factors
    if (has_rule or has_factor) and not rules.all_biases:
        warn_of_missed_biases(model)


def _hyperparams(
    name: str, kinds: Sequence[ParamKind], lr: float, decay: float | None, rules: ParamRules
) -> dict[str, Any]:
    key = rules.key_of(name)
    options = {} if key is None else dict(rules.custom_keys[key])
    lr *= options.pop("lr_factor", 1.0)
    decay_factor = options.pop("decay_factor", 1.0)
    kind_factor = 1.0
    if key is None or not rules.custom_keys_only:
        decay = _base_decay(kinds, decay, rules)
        decay_kind = _kind_of_decay(kinds, rules)
        if decay_kind is not None:
            kind_factor = rules.decay_factors[decay_kind]
        if "bias" in kinds:
            lr *= rules.bias_lr_factor
        lr_kind = _kind_of_lr(kinds, rules)
        if lr_kind is not None:
            lr *= rules.lr_factors[lr_kind]
        if rules.lr_factor_func is not None:
            lr *= rules.lr_factor_func(name)
    options["lr"] = lr
    if decay is not None:
        options["weight_decay"] = decay * decay_factor * kind_factor
    return options


def _base_decay(kinds: Sequence[ParamKind], decay: float | None, rules: ParamRules) -> float | None:
    """The common weight decay, or that of norms or biases, of which the latter wins."""
    if decay is None:
        return None
    if "bias" in kinds and rules.weight_decay_bias is not None:
        return rules.weight_decay_bias
    if "norm" in kinds and rules.weight_decay_norm is not None:
        return rules.weight_decay_norm
    return decay


def _kinds(
    module: nn.Module | None, name: str, param: Tensor, all_biases: bool
) -> Iterator[ParamKind]:
    """The kinds of a parameter with this full name in a module."""
    if isinstance(module, NORM_LAYERS):
        yield "norm"
    if is_bias(name, all_biases):
        yield "bias"
    is_conv = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if is_conv and module.groups == module.in_channels:  # type: ignore[union-attr]
        yield "dwconv"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        yield "embedding"
    if param.ndim == 1:
        yield "flat"


def group_names(groups: Optimizer | Iterable[Mapping[str, Any]], model: nn.Module) -> list[str]:
    """A name for each group, such as ``norm`` or ``backbone.layers.3 weight+bias``: where its parameters are, and what.

    A group that has a ``name`` keeps it. Groups alike get a number.
    """
    modules = dict(model.named_modules())
    names = {param: name for name, param in model.named_parameters()}

    def kind_of(name: str) -> str:
        owner, _, leaf = name.rpartition(".")
        if isinstance(modules.get(owner), NORM_LAYERS):
            return "norm"
        return "bias" if leaf == "bias" else "weight"

    num_seen: Counter[str] = Counter()
    found = []
    for group in _list_of(groups):
        own = [names.get(param, "") for param in group["params"]]
        kinds = dict.fromkeys(kind_of(name) for name in own)
        name = f"{_common_place(own)} {'+'.join(kinds)}".strip()
        name = group.get("name") or name
        num_seen[name] += 1
        found.append(name if num_seen[name] == 1 else f"{name} {num_seen[name]}")
    return found


def _common_place(names: Iterable[str]) -> str:
    """The longest start of modules that all parameters have: ``a.b`` of ``a.b.weight`` and ``a.b.c.bias``."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in itertools.zip_longest(*paths):
        if len({*parts}) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _list_of(groups: Optimizer | Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [*(groups.param_groups if isinstance(groups, Optimizer) else groups)]


def describe_param_groups(groups: Optimizer | Iterable[Mapping[str, Any]], model: nn.Module) -> str:
    """A table of an optimizer's groups with their rates and sizes; if a rate is a tensor, this waits for its device."""
    groups = _list_of(groups)
    rows = []
    for name, group in zip(group_names(groups, model), groups, strict=True):
        lr = f"{float(group['lr']):g}" if "lr" in group else ""
        decay = f"{float(group['weight_decay']):g}" if "weight_decay" in group else ""
        num_values = sum(param.numel() for param in group["params"])
        rows.append([name, lr, decay, len(group["params"]), f"{num_values:,}"])
    headers = ["group", "lr", "decay", "parameters", "values"]
    return format_table(rows, headers, tablefmt="pipe", disable_numparse=True)


_GROUPS = "SOLVER.PARAM_GROUPS"


@PARAM_GROUP_REGISTRY.register()
def groups_by_rules(cfg: CfgNode, model: nn.Module) -> list[dict[str, Any]]:
    """The builder for SOLVER.PARAM_GROUP_BUILDER. Raises ConfigError as `ParamRules` and `build_layer_decay` do."""
    options = cfg.SOLVER.PARAM_GROUPS
    values = collect_arguments(cfg)
    custom_keys = _custom_keys(options.CUSTOM_KEYS)
    layers = {name.lower(): value for name, value in options.LAYER_DECAY.items()}
    try:
        rules = ParamRules(
            cfg.SOLVER.WEIGHT_DECAY_NORM,
            cfg.SOLVER.WEIGHT_DECAY_BIAS,
            cfg.SOLVER.BIAS_LR_FACTOR,
            lr_factors=_factors(options, "LR"),
            decay_factors=_factors(options, "DECAY"),
            custom_keys=custom_keys,
            # without custom keys it has no effect, so any value is accepted
            key_match=options.KEY_MATCH if custom_keys else "longest",
            custom_keys_only=options.CUSTOM_KEYS_ONLY,
            all_biases=cfg.SOLVER.ALL_BIASES,
            lr_factor_func=None if layers["rate"] == 1.0 else build_layer_decay(model, **layers),
        )
        groups = build_param_groups(model, values["lr"], values.get("weight_decay"), rules)
    except ValueError as error:
        raise ConfigError(f"{_GROUPS}: {error}") from error
    _logger.info("Parameter groups:\n%s", describe_param_groups(groups, model))
    return groups


def _custom_keys(entries: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Key -> options. Raises ConfigError if an entry has no key, or that of another entry."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("KEY"):
            options = {name.lower(): value for name, value in entry.items() if name != "KEY"}
            found[entry["KEY"]] = options
    if len(found) < len(entries):
        accepted = (
            "nodes with a KEY that no other has, such as {KEY: backbone.stem, LR_FACTOR: 0.1}"
        )
        raise not_accepted(f"{_GROUPS}.CUSTOM_KEYS", entries, accepted)
    return found


def _factors(options: CfgNode, what: str) -> dict[ParamKind, float]:
    """Kind -> factor of "LR" or "DECAY", of the kinds that have one."""
    factors: dict[ParamKind, float] = {}
    for kind in get_args(ParamKind):
        factor = options[f"{kind.upper()}_{what}_FACTOR"]
        if factor is not None:
            factors[kind] = factor
    return factors
