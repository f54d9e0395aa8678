import inspect

import pytest
import torch
from torch import nn

from trainkit.config import ConfigError, get_cfg
from trainkit.solver import (
    OPTIMIZER_BUILDER_REGISTRY,
    OPTIMIZER_REGISTRY,
    PARAM_GROUP_REGISTRY,
    build_optimizer,
)


def make_cfg(solver=None, **optimizer):
    cfg = get_cfg()
    cfg.merge_from_other_cfg({"SOLVER": {**(solver or {}), "OPTIMIZER": optimizer}})
    return cfg


def make_model(dtype=torch.float32):
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(dtype)


@OPTIMIZER_REGISTRY.register()
class SolverTestSGD(torch.optim.SGD):
    def __init__(self, params, lr, weight_decay, taps=(1, 2)):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.taps = taps


@OPTIMIZER_REGISTRY.register()
def solver_test_adam(params, **kwargs):
    return torch.optim.Adam(params, **kwargs)


def test_the_default_is_sgd_with_the_keys_of_the_solver(caplog):
    caplog.set_level("INFO")
    cfg = make_cfg(
        {
            "BASE_LR": 0.5,
            "MOMENTUM": 0.8,
            "NESTEROV": True,
            "WEIGHT_DECAY": 0.01,
            "WEIGHT_DECAY_NORM": 0.02,
        }
    )
    optimizer = build_optimizer(cfg, make_model())
    assert type(optimizer) is torch.optim.SGD
    assert "SGD of 4 parameters in 2 groups" in caplog.text
    keys = ("lr", "momentum", "dampening", "nesterov", "weight_decay")
    assert [[group[key] for key in keys] for group in optimizer.param_groups] == [
        [0.5, 0.8, 0, True, 0.01],
        [0.5, 0.8, 0, True, 0.02],
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("AdamW", {"BETAS": [0.8, 0.9]}, {"betas": (0.8, 0.9)}),
        (
            "RMSprop",
            {"LR": 0.5, "ALPHA": 0.5, "MOMENTUM": 0.25},
            {"lr": 0.5, "alpha": 0.5, "momentum": 0.25},
        ),
        ("Adafactor", {"EPS": [None, 0.01]}, {"eps": (None, 0.01)}),
        ("SGD", {"MOMENTUM": None}, {"momentum": 0.9}),
    ],
)
def test_any_class_of_torch_takes_its_own_arguments(name, arguments, expected):
    optimizer = build_optimizer(make_cfg({"BASE_LR": 0.1}, NAME=name, **arguments), make_model())
    assert type(optimizer) is getattr(torch.optim, name)
    assert {key: optimizer.defaults[key] for key in expected} == expected
    assert all(optimizer.param_groups[0][key] == value for key, value in expected.items())


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("AdamW", "MOMENTUM", 0.95),
        ("AdamW", "NESTEROV", True),
        ("Rprop", "WEIGHT_DECAY", 0.5),
        ("AdamW", "MOMENTUM", 0.9),  # the default, but it was set
        ("Rprop", "WEIGHT_DECAY", 0.0001),
    ],
)
def test_a_key_of_the_solver_that_is_set_and_not_taken_is_an_error(name, key, value):
    with pytest.raises(ConfigError, match=rf"SOLVER.{key}: got {value} .* {name} does not take it"):
        build_optimizer(make_cfg({key: value}, NAME=name), make_model())
    # which asks for nothing
    build_optimizer(make_cfg({key: type(value)(0)}, NAME=name), make_model())


def test_the_config_file_of_a_run_builds_the_same_optimizer(tmp_path):
    cfg, again = make_cfg(NAME="AdamW"), get_cfg()
    (tmp_path / "config.yaml").write_text(cfg.dump())
    again.merge_from_file(tmp_path / "config.yaml")
    defaults = [build_optimizer(each, make_model()).defaults for each in (cfg, again)]
    assert defaults[0] == defaults[1]


def test_a_function_of_any_arguments_gets_a_momentum_that_was_set_to_the_default():
    @OPTIMIZER_REGISTRY.register()
    def solver_test_any(params, **kwargs):
        return torch.optim.SGD(params, **kwargs)

    cfg = make_cfg(NAME="solver_test_any")
    assert build_optimizer(cfg, make_model()).defaults["momentum"] == 0
    cfg.SOLVER.MOMENTUM = 0.9
    assert build_optimizer(cfg, make_model()).defaults["momentum"] == 0.9


OPTIMIZERS = [
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type)
    and issubclass(value, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS")
]


def test_a_default_of_the_solver_is_never_an_error():
    for name in [*OPTIMIZERS, "SolverTestSGD", "solver_test_adam"]:
        cfg = make_cfg(NAME=name, **({"EPS": 0.5} if "_" in name else {}))
        optimizer = build_optimizer(cfg, nn.Linear(2, 2, bias=False))
        known = inspect.signature(type(optimizer)).parameters
        assert optimizer.defaults.get("momentum", 0) == (0.9 if "momentum" in known else 0)
        # a function may take any argument
        assert "_" not in name or optimizer.defaults["eps"] == 0.5


def test_a_registered_class_is_built_with_its_arguments():
    optimizer = build_optimizer(make_cfg(NAME="SolverTestSGD", TAPS=[3, 4]), make_model())
    assert type(optimizer) is SolverTestSGD
    assert optimizer.taps == (3, 4)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"NAME": "Adm"},
            r"SOLVER.OPTIMIZER.NAME: unknown 'Adm'; did you mean 'Adam'\? .*AdamW.*SGD",
        ),
        ({"NAME": "LBFGS"}, "unknown 'LBFGS'"),
        (
            {"NAME": "Adam", "BETA": [0.9, 0.9]},
            r"Adam refuses .*'beta'.* \(it takes params, lr, betas, eps,",
        ),
        (
            {"NAME": "Adam", "BETAS": [2, 0.9]},
            r"betas=\(2, 0.9\).*Invalid beta parameter at index 0",
        ),
    ],
    ids=str,
)
def test_what_the_optimizer_cannot_take_is_an_error(node, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(make_cfg(**node), make_model())
    with pytest.raises(ConfigError, match="Linear has no trainable parameters"):
        build_optimizer(make_cfg(), nn.Linear(1, 1).requires_grad_(False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_the_fused_implementation_is_chosen_where_it_exists(name, dtype):
    fused = build_optimizer(make_cfg(NAME=name), make_model(dtype)).defaults["fused"]
    if name == "SGD" and dtype == torch.bfloat16:  # see test_every_weight_of_a_small_type
        assert fused is None
    else:
        assert fused is True


@pytest.mark.parametrize(
    ("node", "fused", "foreach"),
    [
        ({"DIFFERENTIABLE": True}, None, None),
        ({"FUSED": False}, False, None),
        ({"FOREACH": True}, None, True),
        ({"FUSED": None}, True, None),
    ],
    ids=str,
)
def test_the_config_may_choose_the_implementation(node, fused, foreach):
    defaults = build_optimizer(make_cfg(NAME="Adam", **node), make_model()).defaults
    assert defaults["fused"] is fused
    assert defaults["foreach"] is foreach


def test_every_weight_of_a_small_type_is_updated():
    """Fused SGD of torch 2.13 leaves most of them out on a CPU (pytorch#191763)."""
    model = nn.Linear(10, 10, bias=False, dtype=torch.float16)
    nn.init.ones_(model.weight)
    optimizer = build_optimizer(make_cfg({"BASE_LR": 0.25, "WEIGHT_DECAY": 0.0}), model)
    for expected in (0.75, 0.28125):  # 0.75 - 0.25 * 1.875, with a momentum of 0.875
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.param_groups[0]["momentum"] = 0.875
        optimizer.step()
        assert torch.equal(model.weight, torch.full_like(model.weight, expected))


def test_sparse_gradients_fall_back_and_can_step():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = build_optimizer(
        make_cfg({"MOMENTUM": 0.0, "WEIGHT_DECAY": 0.0, "BASE_LR": 1.0}), model
    )
    before = model.weight.detach().clone()
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight[1], before[1] - 1)
    assert torch.equal(model.weight[0], before[0])
    model = nn.Embedding(4, 2)
    assert build_optimizer(make_cfg(), model).defaults["fused"] is True
    model.phase = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    assert build_optimizer(make_cfg(), model).defaults["fused"] is None


def test_a_parameter_whose_first_gradient_comes_late_is_updated_as_without_the_fused_implementation():
    """torch's fused SGD raises a TypeError."""
    weights = []
    for fused in (None, False):
        torch.manual_seed(0)
        model = make_model()
        optimizer = build_optimizer(make_cfg({"BASE_LR": 0.5}, NAME="SGD", FUSED=fused), model)
        assert optimizer.defaults["fused"] is (fused is None)
        for late in (False, False, True, True):
            optimizer.zero_grad()
            model[0](torch.ones(1, 2)).sum().backward()
            model[0].bias.grad = model[0].bias.grad if late else None
            optimizer.step()
            # loaded from a state of an earlier version, which has only what had a gradient
            if fused is None:
                state = optimizer.state_dict()
                state["state"] = {
                    i: saved
                    for i, saved in state["state"].items()
                    if saved["momentum_buffer"].any()
                }
                optimizer.load_state_dict(state)
        weights.append([param.detach().clone() for param in model.parameters()])
    torch.testing.assert_close(*weights)


@PARAM_GROUP_REGISTRY.register()
def build_optimizer_test_groups(cfg, model):
    return [{"params": model.parameters(), "lr": cfg.SOLVER.BASE_LR * 10}]


@OPTIMIZER_BUILDER_REGISTRY.register()
def build_optimizer_test_builder(cfg, model):
    return torch.optim.SGD(model.parameters(), lr=0.25)


def test_a_config_may_name_functions_that_make_the_groups_or_the_optimizer():
    groups = build_optimizer(
        make_cfg({"PARAM_GROUP_BUILDER": "build_optimizer_test_groups"}), make_model()
    ).param_groups
    assert [group["lr"] for group in groups] == [0.01]
    cfg = make_cfg({"OPTIMIZER_BUILDER": "build_optimizer_test_builder"}, NAME="AdamW")
    assert [group["lr"] for group in build_optimizer(cfg, make_model()).param_groups] == [0.25]
    with pytest.raises(
        ConfigError, match="SOLVER.OPTIMIZER_BUILDER: no 'mine' in the OPTIMIZER_BUILDER registry"
    ):
        build_optimizer(make_cfg({"OPTIMIZER_BUILDER": "mine"}), make_model())
