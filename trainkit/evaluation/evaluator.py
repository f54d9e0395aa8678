"""The base class of evaluators, and the loop that runs a model over a dataset for them."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from trainkit.evaluation.observer import EvaluationAbandoned, current_observer, for_details
from trainkit.utils import comm
from trainkit.utils.device import device_of, move_to_device
from trainkit.utils.model import unwrap_model
from trainkit.utils.parts import needs_all_ranks, release_gathered
from trainkit.utils.rng import preserve_rng_state
from trainkit.utils.waiting import next_batch

_LOG_PERIOD_SEC = 5.0
_END: Any = object()
_CALLBACKS = ("on_start", "before_inference", "after_inference", "on_end")

logger = logging.getLogger(__name__)


class DatasetEvaluator:
    """Gets every batch of a dataset with the model's outputs, and computes results at the end.

    ``inference_on_dataset`` calls ``bind`` and ``reset``, then ``process`` per batch, then ``evaluate``.
    """

    def bind(self, model: Any) -> None:
        """Get the evaluated model; called before ``reset``."""

    def reset(self) -> None:
        """Forget all batches."""

    def process(self, inputs: Any, outputs: Any) -> None:
        """Process one batch, with its tensors on the model's device, and the model's outputs for it."""

    def keep_up(self, inputs: Any) -> None:
        """Run the model as often as ``process`` does, and ignore the outputs; to override if ``process`` runs it.

        All ranks do each forward pass of a sharded model together, so a rank without a batch repeats one.
        """

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the results; called on every rank, also on one that processed nothing.

        Returns:
            On rank 0 task -> metric -> value; on other ranks an empty dict or None.
        """


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one, in the given order."""

    def __init__(self, evaluators: Sequence[DatasetEvaluator]) -> None:
        self._evaluators = list(evaluators)

    def bind(self, model: Any) -> None:
        for evaluator in self._evaluators:
            if hasattr(evaluator, "bind"):  # detectron2's evaluators have neither bind nor keep_up
                evaluator.bind(model)

    def reset(self) -> None:
        for evaluator in self._evaluators:
            evaluator.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        for evaluator in self._evaluators:
            evaluator.process(inputs, outputs)

    def keep_up(self, inputs: Any) -> None:
        for evaluator in self._evaluators:
            if hasattr(evaluator, "keep_up"):
                evaluator.keep_up(inputs)

    def evaluate(self) -> dict[str, Any]:
        """Merge the results of all evaluators. Raises ValueError if two evaluators report the same key."""
        merged: dict[str, Any] = {}
        reported_by: dict[str, DatasetEvaluator] = {}
        for evaluator in self._evaluators:
            for key, value in _evaluate(evaluator).items():
                if key in merged:
                    raise ValueError(
                        f"{type(reported_by[key]).__name__} and {type(evaluator).__name__} both report the key "
                        f"{key!r}; give one of the two another task name"
                    )
                merged[key], reported_by[key] = value, evaluator
        return merged


def inference_on_dataset(
    model: Callable[[Any], Any],
    data_loader: Iterable[Any],
    evaluator: DatasetEvaluator | Sequence[DatasetEvaluator] | None,
    callbacks: Mapping[str, Callable[[], None]] | None = None,
    *,
    name: str = "",
) -> dict[str, Any]:
    """Run ``model`` over ``data_loader`` in eval mode without gradients, and evaluate its outputs.

    The mode of every submodule and the global random state are restored, also after an error. The caller's
    ``torch.autocast`` applies. It waits for the device once, at the end.

    Args:
        model: an ``nn.Module`` (batches are moved to its device; a data-parallel wrapper is removed), or any function
            of a batch.
        data_loader: needs no length; each rank passes its own part, which may be empty.
        evaluator: None only runs the model.
        callbacks: called once each: ``on_start`` first, ``before_inference`` and ``after_inference`` around all
            batches, ``on_end`` last.
        name: the name of the dataset, for the observer (see `observe_inference`).

    Returns:
        The result of ``evaluator.evaluate()``; ``{}`` for None.

    Raises:
        ValueError: the loader gave no batch on any rank, or a callback has an unknown name.
        TypeError: the evaluator or its result has a wrong type.
        EvaluationAbandoned: on every rank, if the observer of some rank is stopping.
    """
    evaluator = _as_one_evaluator(evaluator)
    if unknown := sorted(set(callbacks or {}) - set(_CALLBACKS)):
        raise ValueError(f"callbacks has unknown names {unknown}; accepted are {', '.join(_CALLBACKS)}")
    callbacks = {**dict.fromkeys(_CALLBACKS, lambda: None), **(callbacks or {})}
    observer, phase = current_observer()
    with ExitStack() as stack:
        stack.enter_context(preserve_rng_state())
        stack.enter_context(torch.no_grad())
        device = None
        if isinstance(model, nn.Module):
            stack.enter_context(inference_context(model))
            # the wrapper's forward broadcasts buffers, which hangs when ranks have different numbers of batches
            model = unwrap_model(model)
            device = device_of(model)
        callbacks["on_start"]()
        evaluator.bind(model)
        evaluator.reset()
        callbacks["before_inference"]()
        observer.before_eval(phase, name)
        num_batches, is_stopping = 0, False
        batches = _with_progress(data_loader, device, name)
        if together := needs_all_ranks(model):
            batches = _in_step_with_all_ranks(batches, model, evaluator, observer.is_stopping, name)
        for inputs in batches:
            # ranks that do their passes together agree on stopping before each batch
            is_stopping = not together and observer.is_stopping()
            if is_stopping:
                break
            if device is not None:
                inputs = move_to_device(inputs, device)
            observer.before_eval_step(phase, num_batches, inputs)
            outputs = model(inputs)
            if comm.get_rank() % comm.get_data_group_size() == 0:
                evaluator.process(inputs, outputs)
            else:  # the first rank of the group counts this batch
                evaluator.keep_up(inputs)
            observer.after_eval_step(phase, num_batches, inputs, outputs)
            num_batches += 1
        by_rank = comm.all_gather((num_batches, is_stopping))
        if any(stopping for _, stopping in by_rank):
            raise _abandoned(name)
        callbacks["after_inference"]()
        # the part of one rank may be empty
        if not any(num for num, _ in by_rank):
            raise ValueError(f"the loader {type(data_loader).__name__} gave no batch; there is nothing to evaluate")
        results = evaluator.evaluate()
        observer.after_eval(phase, name, results)
        callbacks["on_end"]()
    return results


@contextmanager
def inference_context(model: nn.Module) -> Iterator[None]:
    """Context that puts ``model`` into eval mode; at the end it restores the mode of every submodule."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
        release_gathered(model)


def _in_step_with_all_ranks(
    batches: Iterable[Any], model: nn.Module, evaluator: DatasetEvaluator, is_stopping: Callable[[], bool], name: str
) -> Iterator[Any]:
    """The batches of this rank; then take part in the forward passes of other ranks.

    Raises:
        EvaluationAbandoned: on every rank, if some rank is stopping.
    """
    device, own, inputs = device_of(model), iter(batches), _END
    while True:
        new = next(own, _END)
        by_rank = comm.all_gather((new is not _END, inputs is not _END, is_stopping()))
        if any(stopping for _, _, stopping in by_rank):
            raise _abandoned(name)
        having = [rank for rank, (has_new, _, _) in enumerate(by_rank) if has_new]
        if not having:
            return
        if not all(has_new or has_old for has_new, has_old, _ in by_rank):
            borrowed = comm.broadcast(new, src=having[0])  # a rank's part may be empty
            inputs = borrowed if inputs is _END else inputs
        if new is not _END:
            inputs = new
            yield inputs
        else:
            kept = inputs if device is None else move_to_device(inputs, device)
            model(kept)
            evaluator.keep_up(kept)


def _abandoned(name: str) -> EvaluationAbandoned:
    return EvaluationAbandoned(f"the evaluation of {name or 'a data set'} was abandoned: the run is to stop")


def _as_one_evaluator(evaluator: DatasetEvaluator | Sequence[DatasetEvaluator] | None) -> "DatasetEvaluators":
    if evaluator is None or isinstance(evaluator, Sequence):
        return DatasetEvaluators(evaluator or [])
    if not all(callable(getattr(evaluator, method, None)) for method in ("reset", "process", "evaluate")):
        raise TypeError(
            f"evaluator must be a DatasetEvaluator, a sequence of them or None, got {type(evaluator).__name__}"
        )
    return DatasetEvaluators([evaluator])


def _evaluate(evaluator: DatasetEvaluator) -> dict[str, Any]:
    results = evaluator.evaluate()
    if results is None:
        if comm.is_main_process() and type(evaluator).evaluate is not DatasetEvaluator.evaluate:
            raise ValueError(
                f"{type(evaluator).__name__}.evaluate() returned None on rank 0; it must return a dict of "
                "task -> metric -> value there, {} if it has nothing to report"
            )
        return {}
    if not isinstance(results, dict):
        raise TypeError(
            f"{type(evaluator).__name__}.evaluate() must return a dict of task -> metric -> value, "
            f"got {type(results).__name__}"
        )
    return results


def _with_progress(data_loader: Iterable[Any], device: torch.device | None, name: str) -> Iterator[Any]:
    """The batches, with regular log lines, and a summary at the end.

    Regular lines show the time of the host, which runs ahead of an accelerator; the summary waits for the device.
    """
    try:
        total: int | None = len(data_loader)  # type: ignore[arg-type]
    except TypeError:
        total = None
    length = "an unknown number of batches" if total is None else f"{total} batch{'es' * (total != 1)}"
    logger.log(for_details(), "Start inference on %s%s", length, f" of {name}" if name else "")
    num_done, data_sec = 0, 0.0
    start = last_line = before_fetch = time.perf_counter()
    batches = iter(data_loader)
    while (inputs := next_batch(batches, _END)) is not _END:
        data_sec += time.perf_counter() - before_fetch
        yield inputs
        num_done += 1
        before_fetch = time.perf_counter()
        if before_fetch - last_line >= _LOG_PERIOD_SEC:
            last_line = before_fetch
            per_batch = (before_fetch - start) / num_done
            eta = "" if total is None else f", ETA {timedelta(seconds=round(per_batch * max(total - num_done, 0)))}"
            logger.info(
                "Inference done %d%s: %.4f s / batch (data %.4f s)%s",
                num_done,
                "" if total is None else f"/{total}",
                per_batch,
                data_sec / num_done,
                eta,
            )
    if not num_done:
        return
    if device is not None and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and device.type == accelerator.type:
            torch.accelerator.synchronize(device)
    total_sec = time.perf_counter() - start
    logger.log(
        for_details(),
        "Total inference time: %s (%.6f s / batch on this rank, of which %.6f s waiting for data; %d batches)",
        timedelta(seconds=round(total_sec)),
        total_sec / num_done,
        data_sec / num_done,
        num_done,
    )
