import pytest
import torch

from tests.engine.tiny import Regression, batches, sgd
from trainkit.engine.hooks import CallbackHook, GradNorm
from trainkit.engine.step import SimpleTrainer


def test_the_norm_of_all_gradients_is_stored_every_period_and_in_the_last_iteration():
    model, norms = Regression(), []

    def note(trainer):
        norms.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item())

    trainer = SimpleTrainer(model, batches(5), sgd(model))
    trainer.register_hooks([GradNorm(2), CallbackHook(after_backward=note)])
    trainer.train(0, 5)

    values, iters = zip(*trainer.storage.history("grad_norm").values(), strict=True)
    assert iters == (1, 3, 4)
    assert values == pytest.approx([norms[i] for i in iters])
