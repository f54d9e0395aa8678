"""A run that is asked to stop while it waits for data."""

import multiprocessing
import random
import re
import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.engine.tiny import AfterStep
from trainkit.data import InferenceSampler, ResumableLoader, TrainingSampler, watch
from trainkit.engine import SimpleTrainer, hooks
from trainkit.evaluation import inference_on_dataset
from trainkit.utils import waiting

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_SEC", 0.02)


class Numbers(Dataset):
    """``read`` is called before sample 14 is made."""

    def __init__(self, read=lambda: None):
        self.read = read

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 14:
            self.read()
        return torch.full((3,), index / 40) + 0.1 * torch.rand(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, batch):
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()


def hang():
    threading.Event().wait()


def ask_and_hang():
    """In the process of the run: a handler is the only one that can end this."""
    waiting.waiter.get().since -= 1
    signal.raise_signal(signal.SIGTERM)
    hang()


def make_trainer(read, batch_size, num_workers, *more, seed=1):
    """Sample 14 comes in iteration 3, in its second micro-batch if there are two."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = Net()
    sampler = TrainingSampler(40, shuffle=False, seed=3)
    loader = ResumableLoader(Numbers(read), sampler=sampler, batch_size=batch_size, num_workers=num_workers)
    trainer = SimpleTrainer(
        model, loader, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), accumulation_steps=4 // batch_size
    )
    drawn = hooks.CallbackHook(before_step=lambda trainer: trainer.storage.put_scalar("drawn", random.random()))
    trainer.register_hooks([drawn, *more])
    return trainer


def outcome(trainer):
    histories = trainer.storage.histories()
    return {
        "weights": [weight.tolist() for weight in trainer.model.parameters()],
        "drawn": histories["drawn"].values(),
        "losses": histories["total_loss"].values(),
    }


def ask_in_iteration_3(trainer):
    if trainer.iter == 3:
        signal.raise_signal(signal.SIGTERM)


def lose_workers_in_iteration_3(trainer):
    """As if the signal went to all processes and ended the server of the start method forkserver."""
    if trainer.iter == 3:
        for worker in multiprocessing.active_children():
            worker.terminate()


@pytest.mark.parametrize("batch_size", [4, 2])
@pytest.mark.parametrize(
    ("num_workers", "read", "loses"), [(2, hang, False), (2, hang, True), (0, ask_and_hang, False)]
)
def test_a_run_that_is_stopped_while_it_waits_for_data_is_resumed_exactly(num_workers, read, loses, batch_size, caplog):
    whole = make_trainer(lambda: None, batch_size, 0)
    whole.train(0, 8)

    asks = [] if num_workers == 0 else [hooks.CallbackHook(before_step=ask_in_iteration_3)]
    asks += [hooks.CallbackHook(before_step=lose_workers_in_iteration_3)] if loses else []
    stopped = make_trainer(read, batch_size, num_workers, *asks)
    with pytest.raises(SystemExit) as exit:
        stopped.train(0, 8)
    assert (exit.value.code, stopped.status, stopped.iter) == (143, "stopped", 3)
    assert "cannot be resumed exactly" not in caplog.text
    state = stopped.state_dict()

    resumed = make_trainer(lambda: None, batch_size, 2 - num_workers, seed=2)
    resumed.model.load_state_dict(stopped.model.state_dict())
    resumed.load_state_dict(state)
    resumed.train(3, 8)
    assert outcome(resumed) == outcome(whole)

    control = make_trainer(lambda: None, batch_size, 0, seed=2)
    control.model.load_state_dict(stopped.model.state_dict())
    control.load_state_dict({**state, "position": {**state["position"], "before_step_done": False}})
    control.train(3, 8)
    assert outcome(control) != outcome(whole)


def test_a_run_that_is_stopped_while_it_waits_for_data_goes_on_in_the_same_process():
    whole = make_trainer(lambda: None, 2, 0)
    whole.train(0, 8)

    calls = []
    trainer = make_trainer(lambda: calls or (calls.append(1), ask_and_hang()), 2, 0)
    with pytest.raises(SystemExit):
        trainer.train(0, 8)
    trainer.train(3, 8)
    assert outcome(trainer) == outcome(whole)


def test_a_plain_loader_that_hangs_ends_by_a_signal():
    model = Net()
    trainer = SimpleTrainer(model, DataLoader(Numbers(ask_and_hang)), torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(SystemExit):
        trainer.train(0, 40)
    assert (trainer.status, trainer.iter) == ("stopped", 14)


def test_a_short_wait_is_not_given_up(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_SEC", 3600.0)
    trainer = make_trainer(lambda: signal.raise_signal(signal.SIGTERM), 4, 0)
    with pytest.raises(SystemExit):
        trainer.train(0, 8)
    assert trainer.iter == 4  # with the step of that batch


def test_an_evaluation_that_waits_for_data_is_made_again(caplog):
    calls, results = [], []
    dataset = Numbers(lambda: calls or (calls.append(1), ask_and_hang()))
    loader = ResumableLoader(dataset, sampler=InferenceSampler(40), batch_size=4)

    def evaluate():
        inference_on_dataset(trainer.model, loader, None)
        results.append(trainer.iter)

    trainer = make_trainer(lambda: None, 4, 0, hooks.EvalHook(2, evaluate))
    with pytest.raises(SystemExit):
        trainer.train(0, 4)
    assert (trainer.status, trainer.iter, results) == ("stopped", 2, [])
    trainer.train(2, 4)
    assert results == [1, 4]


def test_only_a_step_and_an_evaluation_are_left_for_a_stop():
    """Another wait, such as that of a hook that reads data, has no place where a run could go on."""
    read = []

    def look(trainer):
        signal.raise_signal(signal.SIGTERM)
        read.append(waiting.next_batch(iter(ResumableLoader(Numbers(), batch_size=1, num_workers=1)), None))

    trainer = make_trainer(lambda: None, 4, 0, AfterStep(look))
    with pytest.raises(SystemExit):
        trainer.train(0, 8)
    assert (trainer.iter, len(read)) == (1, 1)


@pytest.mark.parametrize("of_training", [True, False])
def test_a_worker_that_is_lost_during_a_step_is_named_with_its_samples_if_it_had_some(of_training, monkeypatch):
    monkeypatch.setattr(watch, "ENDING_SEC", 1 if of_training else 0)
    torchs_message = "DataLoader worker (pid 7) is killed by signal: Killed."

    class Losing(Net):
        def forward(self, batch):
            for process in multiprocessing.active_children() if of_training else []:
                process.terminate()  # with another code than 0, torch's handler raises anywhere
            raise RuntimeError(torchs_message)  # else it is a worker of an evaluation

    model = Losing()
    loader = ResumableLoader(Numbers(), sampler=TrainingSampler(40, shuffle=False), batch_size=2, num_workers=1)
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(RuntimeError) as caught:
        trainer.train(0, 1)
    named = re.search(r"a loader worker has ended: .*\(pid \d+, ended with exit code 0\)", str(caught.value))
    assert named if of_training else str(caught.value) == torchs_message
    for error in (caught.value, caught.value.__cause__):
        if error is not None:
            error.__traceback__ = None  # it holds the workers
