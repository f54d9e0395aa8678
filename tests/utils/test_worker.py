"""Numbers that wait on a device."""

import torch

from trainkit.utils.events.worker import Numbers


def test_values_of_several_types_are_read_as_floats_in_their_order():
    values = [torch.tensor(2), 0.5, torch.tensor(1.5, requires_grad=True), torch.tensor(3)]
    read = Numbers(values).read()
    assert read == [2.0, 0.5, 1.5, 3.0]
    assert {type(number) for number in read} == {float}
