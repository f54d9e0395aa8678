"""The observer of an evaluation, which is a trainer with its hooks."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

Phase: TypeAlias = Literal["val", "test"]  # the periodic evaluation, and the evaluation of the test data


class EvaluationAbandoned(BaseException):
    """The observer of some rank is stopping, so there are no results. Evaluators may catch any Exception."""


class InferenceObserver:
    """An observer that does nothing; see `trainkit.engine.HookBase` for the points."""

    def is_stopping(self) -> bool:
        """Whether to abandon the evaluation; asked before each batch. Ranks may give different answers."""
        return False

    def is_training(self) -> bool:
        """Whether training continues after the evaluation; then only the log files get details of the evaluation."""
        return False

    def before_eval(self, phase: Phase, name: str) -> None: ...
    def before_eval_step(self, phase: Phase, index: int, inputs: Any) -> None: ...
    def after_eval_step(self, phase: Phase, index: int, inputs: Any, outputs: Any) -> None: ...
    def after_eval(self, phase: Phase, name: str, results: Mapping[str, Any]) -> None: ...


_stack: list[tuple[InferenceObserver, Phase]] = [(InferenceObserver(), "test")]


@contextmanager
def observe_inference(observer: Any, phase: Phase) -> Iterator[None]:
    """Context in which ``inference_on_dataset`` calls the points of ``observer``; the innermost observer counts.

    Args:
        observer: a trainer, or whatever else has the methods of `InferenceObserver`.
    """
    _stack.append((observer, phase))
    try:
        yield
    finally:
        _stack.pop()


def current_observer() -> tuple[InferenceObserver, Phase]:
    return _stack[-1]


def for_details() -> int:
    """The level of a log line with details of an evaluation."""
    return logging.DEBUG if _stack[-1][0].is_training() else logging.INFO
