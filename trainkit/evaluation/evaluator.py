"""The base class of evaluators, and the loop that runs a model over a dataset for them."""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from trainkit.evaluation.observer import EvaluationAbandoned, for_details, present_observer
from trainkit.utils import comm
from trainkit.utils.device import device_of, move_to_device, unwrap_model
from trainkit.utils.env import preserve_rng_state

_LOG_PERIOD_SEC = 5.0

# task -> the names of its metrics; None if these are known only after an evaluation
KnownResults: TypeAlias = Mapping[str, Sequence[str] | None]

logger = logging.getLogger(__name__)


class DatasetEvaluator:
    """Gets every batch of a dataset with the model's outputs, and computes results at the end.

    ``inference_on_dataset`` calls ``bind``, ``bind_loader`` and ``reset``, then ``process`` per
    batch, then ``evaluate``.
    """

    def bind(self, model: Any) -> None:
        """Get the evaluated model; called before ``reset``."""

    def bind_loader(self, data_loader: Iterable[Any]) -> None:
        """Get the loader of the batches; called after ``bind``."""

    def reset(self) -> None:
        """Forget all batches."""

    def process(self, inputs: Any, outputs: Any) -> None:
        """Process one batch, whose tensors are on the model's device, and the model's outputs."""

    def known_results(self) -> KnownResults | None:
        """What `evaluate` will report, so that a wrong name of a metric is found before training.

        None if it is not known.
        """
        return None

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the results; called on every rank, also on one that processed nothing.

        Returns:
            On rank 0 task -> metric -> value; on other ranks an empty dict or None.
        """


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one, in the given order.

    Raises ValueError if two of them report the same task.
    """

    def __init__(self, evaluators: Sequence[DatasetEvaluator]) -> None:
        self.evaluators = list(evaluators)
        reported_by: dict[str, str] = {}  # task -> name of the evaluator
        for evaluator in self.evaluators:
            name = type(evaluator).__name__
            for task in known_results_of(evaluator) or ():
                if task in reported_by:
                    raise ValueError(
                        f"{reported_by[task]} and {name} both report {task!r}; leave one out, or "
                        "give it another task"
                    )
                reported_by[task] = name

    def known_results(self) -> KnownResults | None:
        known: dict[str, Sequence[str] | None] = {}
        for evaluator in self.evaluators:
            of_one = known_results_of(evaluator)
            if of_one is None:
                return None
            known |= of_one
        return known

    def bind(self, model: Any) -> None:
        for evaluator in self.evaluators:
            if hasattr(evaluator, "bind"):  # detectron2's have no such method
                evaluator.bind(model)

    def bind_loader(self, data_loader: Iterable[Any]) -> None:
        for evaluator in self.evaluators:
            if hasattr(evaluator, "bind_loader"):  # nor this one
                evaluator.bind_loader(data_loader)

    def reset(self) -> None:
        for evaluator in self.evaluators:
            evaluator.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        for evaluator in self.evaluators:
            evaluator.process(inputs, outputs)

    def evaluate(self) -> dict[str, Any]:
        """Merge the results of all evaluators.

        Raises ValueError if two evaluators report the same key.
        """
        merged: dict[str, Any] = {}
        for evaluator in self.evaluators:
            results = evaluator.evaluate() or {}
            twice = merged.keys() & results.keys()
            if twice:
                raise ValueError(
                    f"{type(evaluator).__name__} and an evaluator before it both report "
                    f"{sorted(twice)}"
                )
            merged.update(results)
        return merged


def known_results_of(evaluator: Any) -> KnownResults | None:
    """Its `known_results`; detectron2's evaluators do not have the method."""
    if not hasattr(evaluator, "known_results"):
        return None
    return cast(KnownResults | None, evaluator.known_results())


def inference_on_dataset(
    model: Callable[[Any], Any],
    data_loader: Iterable[Any],
    evaluator: DatasetEvaluator | Sequence[DatasetEvaluator] | None,
    callbacks: Mapping[str, Callable[[], None]] | None = None,
    *,
    name: str = "",
) -> dict[str, Any]:
    """Run ``model`` over ``data_loader`` in eval mode without gradients, and evaluate its outputs.

    The mode of every submodule and the global random state are restored.

    If all ranks must do each forward pass together, the model has a method
    ``batches_of_all_ranks(data_loader, evaluators, is_stopping)``: it yields this rank's batches,
    runs the model itself for those of other ranks, and raises EvaluationAbandoned on all ranks if
    some rank is stopping.

    Args:
        model: an ``nn.Module`` (batches are moved to its device; a data-parallel wrapper is
            removed), or any function of a batch.
        data_loader: needs no length; each rank passes its own part, which may be empty.
        evaluator: None only runs the model.
        callbacks: ``on_start``, ``before_inference`` and ``after_inference`` (around all batches),
            ``on_end``.
        name: the name of the dataset, for the observer (see `observe_inference`) and the log.

    Raises:
        ValueError: the loader gave no batch on any rank.
        EvaluationAbandoned: on every rank, if the observer of some rank is stopping.
    """
    evaluators = _as_one(evaluator)
    callbacks = callbacks or {}
    observer, phase = present_observer()
    start_sec = time.perf_counter()
    with preserve_rng_state(), torch.no_grad(), inference_context(model):
        device = None
        if isinstance(model, nn.Module):
            # the wrapper's forward broadcasts buffers, which hangs when ranks have different
            # numbers of batches
            model = unwrap_model(model)
            device = device_of(model)
        callbacks.get("on_start", _nothing)()
        evaluators.bind(model)
        evaluators.bind_loader(data_loader)
        evaluators.reset()
        callbacks.get("before_inference", _nothing)()
        observer.before_eval(phase, name)
        num_batches, is_stopping = _run_model(model, device, data_loader, evaluators, name)
        by_rank = comm.all_gather((num_batches, is_stopping, _sum_of_buffers(model)))
        if any(stopping for _, stopping, _ in by_rank):
            raise EvaluationAbandoned(
                f"the evaluation of {name or 'a data set'} was abandoned: the run is to stop"
            )
        callbacks.get("after_inference", _nothing)()
        if len({total for _, _, total in by_rank}) > 1:
            _warn_of_buffers(name)
        if not any(num for num, _, _ in by_rank):  # the part of one rank may be empty
            raise ValueError(
                f"the loader {type(data_loader).__name__} gave no batch; there is nothing to "
                "evaluate"
            )
        results = evaluators.evaluate()
        observer.after_eval(phase, name, results)
        callbacks.get("on_end", _nothing)()
    total_sec = time.perf_counter() - start_sec
    logger.log(
        for_details(),
        "Total inference time: %s (%.6f s / batch on this rank)",
        timedelta(seconds=round(total_sec)),
        total_sec / max(num_batches, 1),
    )
    return results


def _as_one(evaluator: DatasetEvaluator | Sequence[DatasetEvaluator] | None) -> DatasetEvaluators:
    if isinstance(evaluator, Sequence):
        return DatasetEvaluators(evaluator)
    if evaluator is None:
        return DatasetEvaluators([])
    return DatasetEvaluators([evaluator])


def _nothing() -> None: ...


def _sum_of_buffers(model: Any) -> str:
    """The sum of all floats in the model's buffers, to compare it with other ranks; "" if alone."""
    if comm.get_world_size() == 1 or not isinstance(model, nn.Module):
        return ""
    total = 0.0
    for buffer in model.buffers():
        if buffer.is_floating_point() and not hasattr(buffer, "full_tensor"):
            total += buffer.double().sum().item()
    return str(total)  # as text, NaN equals NaN


@functools.cache  # once
def _warn_of_buffers(name: str) -> None:
    logger.warning(
        "Buffers of the model, such as the statistics of batch norm, differ between ranks: each "
        "rank has evaluated its part of %s with its own, and a checkpoint has those of rank 0. "
        "The hook SyncBuffers averages them",
        name or "the data",
    )


def _run_model(
    model: Callable[[Any], Any],
    device: torch.device | None,
    data_loader: Iterable[Any],
    evaluators: DatasetEvaluators,
    name: str,
) -> tuple[int, bool]:
    """Give each batch, with the model's outputs for it, to the evaluators.

    Returns:
        The number of batches, and whether the observer of this rank is stopping.
    """
    observer, phase = present_observer()
    batches = data_loader
    batches_of_all_ranks = getattr(model, "batches_of_all_ranks", None)
    if batches_of_all_ranks:
        batches = batches_of_all_ranks(data_loader, evaluators, observer.is_stopping)
    num_done = 0
    for inputs in _with_progress(batches, data_loader, name):
        # ``batches_of_all_ranks`` asks by itself
        if not batches_of_all_ranks and observer.is_stopping():
            return num_done, True
        if device is not None:
            inputs = move_to_device(inputs, device)
        observer.before_eval_step(phase, num_done, inputs)
        outputs = model(inputs)
        evaluators.process(inputs, outputs)
        observer.after_eval_step(phase, num_done, inputs, outputs)
        num_done += 1
    return num_done, False


@contextmanager
def inference_context(model: Any) -> Iterator[None]:
    """Context that puts a model into eval mode.

    At the end it restores the mode of every submodule.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _with_progress(batches: Iterable[Any], data_loader: Any, name: str) -> Iterator[Any]:
    """The batches, with regular log lines."""
    try:
        total = len(data_loader)
    except TypeError:
        total = None
    of_total = "" if total is None else f" of {total} batches"
    of_name = f" of {name}" if name else ""
    logger.log(for_details(), "Start inference%s%s", of_total, of_name)
    start_sec = time.perf_counter()
    last_line_sec = start_sec
    for num_done, inputs in enumerate(batches, 1):
        yield inputs
        now_sec = time.perf_counter()
        if now_sec - last_line_sec < _LOG_PERIOD_SEC:
            continue
        last_line_sec = now_sec
        sec_per_batch = (now_sec - start_sec) / num_done
        eta = ""
        if total is not None:
            remaining_sec = sec_per_batch * max(total - num_done, 0)
            eta = f", ETA {timedelta(seconds=round(remaining_sec))}"
        logger.info(
            "Inference done: %d%s, %.4f s / batch%s", num_done, of_total, sec_per_batch, eta
        )
