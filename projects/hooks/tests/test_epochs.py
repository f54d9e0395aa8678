"""Periods in epochs."""

from types import SimpleNamespace

from trainkit.engine.hooks import is_due_epoch
from trainkit.utils.periods import periods_done


def trainer_at(iter, max_iter=10, iters_per_epoch=3):
    epoch = periods_done(iter, iters_per_epoch)
    return SimpleNamespace(iter=iter, max_iter=max_iter, iters_per_epoch=iters_per_epoch, epoch=epoch)


def test_an_epoch_is_due_by_its_own_number():
    at_the_end = [trainer_at(iter, max_iter=31) for iter in range(2, 31, 3)]  # of epochs 0 to 9, and one iteration more

    assert [t.epoch for t in at_the_end if is_due_epoch(t, 4)] == [3, 7]
    assert [t.epoch for t in at_the_end if is_due_epoch(t, 2, offset=5)] == [4, 6, 8]
    assert [t.epoch for t in at_the_end if is_due_epoch(t, 0)] == []
    assert [t.epoch for t in at_the_end if is_due_epoch(t, 4, or_last=True)] == [3, 7]
    whole = [trainer_at(iter, max_iter=30) for iter in range(2, 30, 3)]
    assert [t.epoch for t in whole if is_due_epoch(t, 4, or_last=True)] == [3, 7, 9]
