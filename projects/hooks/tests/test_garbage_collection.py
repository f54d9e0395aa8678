import gc
import weakref

import pytest

from tests.engine.tiny import Steps, fail_at
from trainkit.engine.hooks import CallbackHook, GarbageCollection


@pytest.fixture(autouse=True)
def enabled():
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    gc.enable() if was_enabled else gc.disable()


class Knot:
    def __init__(self):
        self.self = self


def knots(*hooks, iters=7):
    """For each iteration the earlier ones whose garbage is still there behind it; each makes a little."""
    made, found = [], []
    note = CallbackHook(after_step=lambda trainer: found.append([i for i, knot in enumerate(made) if knot()]))
    trainer = Steps(hooks, step=lambda iter: made.append(weakref.ref(Knot())))
    trainer.register_hooks([note], priority="LOW")
    trainer.train(0, iters)
    return found


def test_garbage_is_collected_every_period_and_not_between():
    assert knots(GarbageCollection(3)) == [[0], [0, 1], [], [3], [3, 4], [], [6]]


def test_a_failure_puts_it_back():
    with pytest.raises(RuntimeError, match="step 1 failed"):
        Steps([GarbageCollection()], step=fail_at(1)).train(0, 3)
    assert gc.isenabled()
