"""The observer of an evaluation, which is a trainer with its hooks."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

# the periodic evaluation, and the evaluation of the test data
Phase: TypeAlias = Literal["val", "test"]


class EvaluationAbandoned(BaseException):
    """The observer of some rank is stopping, so there are no results.

    It is no Exception, since evaluators may catch any Exception.
    """


class InferenceObserver:
    """An observer that does nothing; see `trainkit.engine.HookBase` for the points."""

    def is_stopping(self) -> bool:
        """Whether to abandon the evaluation; asked before each batch.

        Ranks may give different answers.
        """
        return False

    def is_training(self) -> bool:
        """Whether training continues after the evaluation.

        Then only the log files get details of the evaluation.
        """
        return False

    def before_eval(self, phase: Phase, name: str) -> None: ...
    def before_eval_step(self, phase: Phase, index: int, inputs: Any) -> None: ...
    def after_eval_step(self, phase: Phase, index: int, inputs: Any, outputs: Any) -> None: ...
    def after_eval(self, phase: Phase, name: str, results: Mapping[str, Any]) -> None: ...


_present: ContextVar[tuple[Any, Phase]] = ContextVar(
    "observer and phase", default=(InferenceObserver(), "test")
)


@contextmanager
def observe_inference(observer: Any, phase: Phase) -> Iterator[None]:
    """Context in which ``inference_on_dataset`` calls the points of ``observer``, in this thread.

    The observer is usually a trainer.
    """
    token = _present.set((observer, phase))
    try:
        yield
    finally:
        _present.reset(token)


def present_observer() -> tuple[Any, Phase]:
    """The observer of this thread, and the phase."""
    return _present.get()


_labels: list[str] = [""]  # the last one counts


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Context in which tables of results have a label, such as "ema".

    For a dataset that is evaluated more than once.
    """
    _labels.append(label)
    try:
        yield
    finally:
        _labels.pop()


def say_results_of(name: str) -> str:
    """The title of a table of results: ``Results on digits_test (ema):``."""
    if _labels[-1]:
        return f"Results on {name} ({_labels[-1]}):"
    return f"Results on {name}:"


def for_details() -> int:
    """The level of a log line with details of an evaluation."""
    observer, _ = present_observer()
    return logging.DEBUG if observer.is_training() else logging.INFO
