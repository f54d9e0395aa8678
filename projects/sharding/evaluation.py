"""The batches of an evaluation for a model whose ranks do each forward pass together."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from trainkit.projects.sharding.tensors import release_gathered

from trainkit.evaluation.evaluator import DatasetEvaluators
from trainkit.evaluation.observer import EvaluationAbandoned
from trainkit.utils import comm
from trainkit.utils.device import device_of, move_to_device

_END: Any = object()


def batches_of_all_ranks(
    model: nn.Module, data_loader: Iterable[Any], evaluators: DatasetEvaluators, is_stopping: Callable[[], bool]
) -> Iterator[Any]:
    """The batches of this rank; a rank without a batch repeats one until all ranks are done.

    Of ranks that compute a batch together, only the first one evaluates it. `inference_on_dataset` calls this as a
    method of the model. An evaluator that runs the model too has a method ``keep_up(inputs)``, which runs it as often
    as ``process`` does.

    Raises:
        EvaluationAbandoned: on every rank, if some rank is stopping.
    """
    device, own, last = device_of(model), iter(data_loader), _END
    is_first_of_group = comm.get_rank() % comm.get_data_group_size() == 0
    while True:
        new = next(own, _END)
        by_rank = comm.all_gather((new is not _END, last is not _END, is_stopping()))
        having = [rank for rank, (has_new, _, _) in enumerate(by_rank) if has_new]
        if not having or any(stopping for _, _, stopping in by_rank):
            release_gathered(model)
        if any(stopping for _, _, stopping in by_rank):
            raise EvaluationAbandoned("the evaluation was abandoned: the run is to stop")
        if not having:
            return
        if not all(has_new or has_last for has_new, has_last, _ in by_rank):
            borrowed = comm.broadcast(new, src=having[0])  # a rank's part may be empty
            last = borrowed if last is _END else last
        last = last if new is _END else new
        if new is not _END and is_first_of_group:
            yield new
            continue
        inputs = last if device is None else move_to_device(last, device)
        model(inputs)
        _keep_up(evaluators, inputs)


def _keep_up(evaluator: Any, inputs: Any) -> None:
    for part in evaluator.evaluators if isinstance(evaluator, DatasetEvaluators) else ():
        _keep_up(part, inputs)
    if hasattr(evaluator, "keep_up"):
        evaluator.keep_up(inputs)
