"""What a step costs in calls of Python functions, which no busy machine can disturb."""

import itertools
import sys

from tests.engine.tiny import AfterStep, Regression, batches, sgd
from trainkit.engine import SimpleTrainer

STEPS = 1000


class Endless:
    def __iter__(self):
        return itertools.cycle(batches(5))


def bare_loop(model, optimizer):
    data = iter(Endless())
    for _ in range(STEPS):
        loss = model(next(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def calls(work):
    """Of Python functions, per step."""
    found = [0]

    def count(frame, event, argument):
        found[0] += event == "call"

    work()  # what is done once is not counted
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found[0] / STEPS


def calls_of_trainer(*hooks):
    model = Regression()
    trainer = SimpleTrainer(model, Endless(), sgd(model))
    trainer.register_hooks(hooks)
    return calls(lambda: trainer.train(0, STEPS))


def test_a_step_makes_at_most_25_calls_more_than_a_bare_loop():
    model = Regression()
    bare = calls(lambda: bare_loop(model, sgd(model)))
    own = calls_of_trainer() - bare
    assert own <= 25.6  # with a share of the start of a run
    with_hook = calls_of_trainer(AfterStep(lambda trainer: None)) - bare
    assert own + 1.9 < with_hook < own + 3  # a hook costs its own calls alone
