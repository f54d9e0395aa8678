"""Names and the table of parameter groups."""

import torch
from torch import nn
from trainkit.projects.solver_extras import describe_param_groups, group_names

from trainkit.solver import get_default_optimizer_params


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(2))
        self.head = nn.Linear(2, 2)


def test_a_group_is_called_by_what_and_where_its_parameters_are():
    model = Net()
    assert group_names(get_default_optimizer_params(model, 0.1, 0.1, 0.0), model) == ["weight+bias", "layers norm"]
    by_layer = [{"params": [*layer.parameters()]} for layer in model.layers]
    alike = [{"params": [param]} for param in (model.head.weight, nn.Parameter(torch.zeros(1)))]
    own = [{"params": [model.head.bias], "name": "mine"}, {"params": [model.head.weight]}]
    assert group_names([*by_layer, *alike, *own], model) == [
        *("layers.0 weight+bias+norm", "layers.1 weight+bias+norm"),
        *("head weight", "weight", "mine", "head weight 2"),
    ]


def test_the_table_of_groups_shows_what_tells_them_apart():
    model = Net()
    overrides = {"head.bias": {"lr": 0.05}}
    groups = get_default_optimizer_params(model, 0.5, 0.0001, overrides=overrides)
    table = describe_param_groups(torch.optim.SGD(groups, lr=0.5, momentum=0.9), model)
    assert [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if ":" not in line
    ] == [
        ["group", "lr", "decay", "parameters", "values"],
        ["weight+bias+norm", "0.5", "0.0001", "9", "24"],
        ["head bias", "0.05", "0.0001", "1", "2"],
    ]
