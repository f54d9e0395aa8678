"""How many samples a batch has."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit.projects.evaluators.samples import SampleCounter

from trainkit.data import trivial_batch_collator
from trainkit.data.common import FirstBatches

X = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, 4),
        ((X, torch.ones(4)), 4),
        ([X, torch.ones(4)], 4),  # collated
        ([torch.ones(5, 2), torch.zeros(5, 2, dtype=torch.int64)], 5),
        ([X, {"label": torch.ones(4)}], 4),
        ({"scale": 2, "weight": torch.ones(()), "x": [X]}, 4),
        ([{"x": X}] * 3, 3),
        ([(X, 1)] * 3, 3),
        ([torch.ones(7), torch.ones(2), torch.ones(5)], 3),
        ([torch.ones(3, 8, 8), torch.ones(3, 5, 6), torch.ones(3, 4, 4)], 3),
        ([torch.ones(())] * 6, 6),
        (["a", "b"], 2),
        ([], 0),
    ],
)
def test_a_batch_of_every_kind_is_counted(batch, expected, caplog):
    assert SampleCounter(nn.Linear(1, 1))(batch) == expected
    assert caplog.text == ""


def test_a_list_of_tensors_of_one_kind_is_a_list_of_samples_unless_the_loader_has_collated_it(
    caplog,
):
    """Three images of 1 x 8 x 8, or pairs of inputs and targets of the same shape."""
    images = [torch.ones(1, 8, 8)] * 3
    model = nn.Linear(1, 1)
    assert SampleCounter(model)(images) == 3
    [message] = caplog.messages
    assert "a guess, 3: " in message
    assert "3 tensors, whose first dimension is 1" in message
    assert "num_samples(batch)" in message
    SampleCounter(model)(images)  # once
    assert len(caplog.messages) == 1
    for collate_fn in (trivial_batch_collator, list):
        loader = DataLoader(images, batch_size=3, collate_fn=collate_fn)
        assert [SampleCounter(nn.Linear(1, 1), loader)(batch) for batch in loader] == [3]
    pairs = DataLoader(TensorDataset(torch.ones(7, 2), torch.ones(7, 2)), batch_size=5)
    for loader in (pairs, FirstBatches(pairs, 2)):
        assert [SampleCounter(nn.Linear(1, 1), loader)(batch) for batch in loader] == [5, 2]
    assert len(caplog.messages) == 1


def test_tensors_that_disagree_draw_one_warning_per_model(caplog):
    time_major = (torch.ones(9, 2, 5), torch.ones(2))
    model = nn.Linear(1, 1)
    assert [SampleCounter(model)(time_major) for _ in range(2)] == [9, 9]
    [message] = caplog.messages
    assert "a guess, 9: the first dimensions of its tensors are [9, 2]" in message
    SampleCounter(nn.Linear(1, 1))({"x": X, "boxes": torch.ones(11, 4)})
    assert len(caplog.messages) == 2


class Says(nn.Module):
    def num_samples(self, batch):
        return batch[0].shape[1]


class Loader:
    def num_samples(self, batch):
        return 77


def test_a_model_or_a_loader_may_say_it_and_the_model_wins(caplog):
    time_major = (torch.ones(9, 2, 5), torch.ones(2))
    assert SampleCounter(Says())(time_major) == 2
    assert SampleCounter(nn.DataParallel(Says()))(time_major) == 2
    assert SampleCounter(None, Loader())(time_major) == 77
    assert SampleCounter(Says(), Loader())(time_major) == 2
    assert SampleCounter(None, FirstBatches(Loader(), 1))(time_major) == 77
    assert caplog.text == ""


def test_what_cannot_be_counted_is_an_error():
    with pytest.raises(TypeError, match="dict is no list of samples and holds no tensor"):
        SampleCounter()({"x": 1.0})
    model = nn.Linear(1, 1)
    model.num_samples = lambda batch: 0.5
    with pytest.raises(TypeError, match="must return an int >= 0, got 0.5"):
        SampleCounter(model)(X)
