import pytest
from torch.utils.data import DataLoader, Dataset

from trainkit.utils.waiting import next_batch

END = object()


class Ending(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return next(iter(())) if index == 2 else index


def test_the_end_of_the_data_is_no_error():
    def generator():
        yield 1
        return "a value, which StopIteration carries"

    for loader in ([1], DataLoader([1], num_workers=1), generator()):
        batches = iter(loader)
        assert next_batch(batches, END) == 1
        assert next_batch(batches, END) is END


@pytest.mark.parametrize(
    ("num_workers", "message"), [(0, "sample 2 of Ending raised"), (1, "(?s)a sample raised StopIteration.*Original T")]
)
def test_a_sample_that_raises_stop_iteration_is_no_end_of_a_plain_loader(num_workers, message):
    batches = iter(DataLoader(Ending(), batch_size=2, num_workers=num_workers))
    assert next_batch(batches, END).tolist() == [0, 1]
    with pytest.raises(RuntimeError, match=message):
        next_batch(batches, END)
