import math

import pytest
import torch

from tests.engine.tiny import Weight, sgd
from trainkit.engine.hooks import CallbackHook, CheckFiniteLoss
from trainkit.engine.step import SimpleTrainer

pytestmark = pytest.mark.usefixtures("worker")


def trainer_of(values, interval, compute=lambda weight, batch: weight * batch, trainer_class=SimpleTrainer, **kwargs):
    model = Weight(compute)
    data = [torch.tensor(value) for value in values]
    trainer = trainer_class(model, data, sgd(model, lr=0.25), async_write_metrics=True, **kwargs)
    trainer.register_hooks([CheckFiniteLoss(interval)])
    return trainer


@pytest.mark.parametrize(("interval", "iter"), [(1, 3), (3, 5), (4, 3)])
def test_every_interval_th_iteration_stops_before_its_update(interval, iter):
    trainer = trainer_of([1.0, 1.0, 1.0, math.nan, 1.0, math.nan], interval)
    weights = []
    trainer.register_hooks([CallbackHook(before_step=lambda t: weights.append(t.model.weight.item()))])
    with pytest.raises(FloatingPointError, match=f"in iteration {iter}, .*total_loss': nan"):
        trainer.train(0, 6)
    assert (trainer.iter, trainer.status) == (iter, "failed")
    assert trainer.model.weight.item() == pytest.approx(weights[iter], nan_ok=True)
    # what an asynchronous run does to the weights in the iterations between
    assert [math.isnan(weight) for weight in weights] == [i > 3 for i in range(iter + 1)]
