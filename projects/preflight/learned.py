"""What a model knows of other samples after it has learned many."""

from typing import NamedTuple

from trainkit.projects.preflight.evaluated import Answers, ask_model
from trainkit.projects.preflight.findings import NotAsked
from trainkit.projects.preflight.job import CONSTANT_RATE, Job
from trainkit.projects.preflight.samples import classes_of

from trainkit.utils.device import unwrap_model

_STEPS = 120
_MOST_SAMPLES = 640
_MOST_BATCHES = 16
_LEARNED_PER_CLASS = 20
_ASKED = 100


class Learned(NamedTuple):
    """The number of samples that a model has learned, and its answers for others of the same pass."""

    number: int
    answers: Answers


def learn_batches(job: Job, num_classes: int) -> Learned:
    """Learn about half of the first pass over TRAIN, at most `_MOST_SAMPLES`.

    Raises:
        NotAsked: the pass has too few samples, or the loss diverges.
    """
    batch_size = len(classes_of(job.batches[0], ndim=1))
    most = min(_MOST_BATCHES, max(2, _MOST_SAMPLES // batch_size))
    num_batches = job.num_of_first_pass(2 * most)
    trainer = job.build()
    batches = [trainer.fetch() for _ in range(num_batches)]
    num_learned = num_batches // 2
    learned = batches[:num_learned]
    others = batches[num_learned:]
    number = num_learned * batch_size
    num_others = len(others) * batch_size
    if number < _LEARNED_PER_CLASS * num_classes or num_others < _ASKED:
        raise NotAsked(f"{number} samples to learn, and {num_others} others, are too few")
    trainer = job.build(*CONSTANT_RATE)
    trainer.data_loader = learned
    try:
        job.make(trainer, _STEPS)
    except FloatingPointError as error:
        raise NotAsked(f"with {number} samples the training fails: {error}") from error
    answers = ask_model(unwrap_model(trainer.model), others)
    if answers is None:
        raise NotAsked("no classification")
    return Learned(number, answers)
