"""The batches of an evaluation for a model whose ranks do each forward pass together."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from trainkit.projects.sharding.tensors import release_gathered

from trainkit.evaluation.observer import EvaluationAbandoned
from trainkit.utils import comm

_END: Any = object()


def batches_of_all_ranks(
    model: nn.Module, data_loader: Iterable[Any], is_stopping: Callable[[], bool]
) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is this rank's own: a rank without a batch repeats one until all ranks are done.

    `inference_on_dataset` calls this as a method of the model.

    Raises:
        EvaluationAbandoned: on every rank, if some rank is stopping.
    """
    own, last = iter(data_loader), _END
    while True:
        new = next(own, _END)
        by_rank = comm.all_gather((new is not _END, last is not _END, is_stopping()))
        if any(stopping for _, _, stopping in by_rank) or not any(has_new for has_new, _, _ in by_rank):
            release_gathered(model)
        having = [rank for rank, (has_new, _, _) in enumerate(by_rank) if has_new]
        if any(stopping for _, _, stopping in by_rank):
            raise EvaluationAbandoned("the evaluation was abandoned: the run is to stop")
        if not having:
            return
        if not all(has_new or has_last for has_new, has_last, _ in by_rank):
            borrowed = comm.broadcast(new, src=having[0])  # a rank's part may be empty
            last = borrowed if last is _END else last
        last = last if new is _END else new
        yield last, new is not _END
