"""What breaks a run off in its middle, as a kill would."""

from trainkit.engine import HookBase


class Killed(Exception):
    pass


class Killer(HookBase):
    """Raises `Killed` behind iteration ``iter``; never, if that is -1."""

    def __init__(self, iter):
        self.iter = iter

    def after_step(self):
        if self.trainer.iter == self.iter:
            raise Killed
