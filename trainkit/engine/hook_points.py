"""The hook points of a trainer, as methods."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hook_list import Anchor, HookList
from trainkit.evaluation.observer import InferenceObserver, Phase
from trainkit.utils.periods import periods_done


class HookPoints(InferenceObserver):
    """A method for each hook point that calls the hooks; a trainer class may override these methods."""

    iter: int
    status: str

    def __init__(self) -> None:
        self._hook_list = HookList(weakref.proxy(self))

    def register_hooks(
        self,
        hooks: Iterable[HookBase | None],
        *,
        priority: int | str | None = None,
        before: Anchor | None = None,
        after: Anchor | None = None,
    ) -> None:
        """Add hooks after those with the same or a lower ``priority`` number; None entries are skipped.

        Args:
            priority: 0 (first) to 100 (last), or a name of `Priority`; default is each hook's own. Hooks above the
                number `SAVE_POINT` run below the save point.
            before, after: a registered hook, its class, or the name of its class: the new hooks are placed next to it.

        Raises:
            TypeError: an entry is not a `HookBase` object, or a method of it does not take the arguments of its point.
            ValueError: a hook is already registered; the priority is out of range; more than one of priority, before
                and after is given; the anchor is absent or matches several hooks.
        """
        self._hook_list.add(hooks, priority, before, after)

    @property
    def hooks(self) -> Sequence[HookBase]:
        """The registered hooks, in their order."""
        return tuple(self._hook_list.hooks)

    @property
    def _hooks(self) -> list[HookBase]:
        """The list itself, for detectron2 users, who change its order by hand."""
        return self._hook_list.hooks

    @_hooks.setter
    def _hooks(self, hooks: list[HookBase]) -> None:
        self._hook_list.hooks = hooks
        self._hook_list.update()

    def describe_hooks(self) -> str:
        """The hooks of each point in their order: one line per point, and one for the save point."""
        self._hook_list.update()
        return self._hook_list.describe()

    # ------------------------------------------------------------------ epochs

    @property
    def iters_per_epoch(self) -> int:
        """Iterations per pass over the training data; a subclass that knows its data overrides this.

        It is rounded, but epochs do not drift: n epochs are ``round(n * exact)`` iterations.

        Raises:
            ValueError: there are no epochs.
        """
        raise ValueError(f"{type(self).__name__} does not define iters_per_epoch, so it has no epochs; use iterations")

    @property
    def has_epochs(self) -> bool:
        try:
            return self.iters_per_epoch > 0
        except ValueError:
            return False

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return periods_done(self.iter, self.iters_per_epoch)

    # ------------------------------------------------------------------ the points

    def before_train(self) -> None:
        self._hook_list.call("before_train")

    def before_epoch(self) -> None:
        self._hook_list.call("before_epoch")

    def before_step(self) -> None:
        self._hook_list.call("before_step")

    def after_backward(self) -> None:
        """A user's ``run_step`` must call it between the gradients and the update."""
        self._hook_list.call("after_backward")

    def acts_after_backward(self) -> bool:
        """Whether a hook or a subclass does anything in ``after_backward``."""
        hooks = self._hook_list.at["after_backward"]
        if type(self).after_backward is not HookPoints.after_backward:
            return True
        # a hook that forwards the point to an outer trainer asks that trainer
        return any(hook.acts_after_backward() if hasattr(hook, "acts_after_backward") else True for hook in hooks)

    def end_update(self) -> None:
        """Note the values that ``run_step`` has used, before a hook changes them."""

    def after_step(self) -> None:
        """Call the hooks above the save point."""
        self.end_update()
        self._hook_list.call("after_step")

    def after_epoch(self) -> None:
        self._hook_list.call("after_epoch")

    def is_training(self) -> bool:
        return self.status == "running"

    def before_eval(self, phase: Phase, name: str) -> None:
        """Like the next three points: called by ``inference_on_dataset`` under `observe_inference`."""
        self._hook_list.call("before_eval", phase, name)

    def before_eval_step(self, phase: Phase, index: int, inputs: Any) -> None:
        self._hook_list.call("before_eval_step", phase, index, inputs)

    def after_eval_step(self, phase: Phase, index: int, inputs: Any, outputs: Any) -> None:
        self._hook_list.call("after_eval_step", phase, index, inputs, outputs)

    def after_eval(self, phase: Phase, name: str, results: Mapping[str, Any]) -> None:
        self._hook_list.call("after_eval", phase, name, results)

    def before_save(self, state: dict[str, Any]) -> None:
        """Like ``after_load``: called by the `Checkpointer` that saves this trainer."""
        self._hook_list.call("before_save", state)

    def after_load(self, state: dict[str, Any]) -> None:
        self._hook_list.call("after_load", state)
