"""The one rule of everything that happens every so often."""


def is_nth(done: int, period: int, offset: int = 0) -> bool:
    """Whether ``done`` things that are counted from 1 end a period: at ``offset``, ``offset + period``, ...

    With an offset of 0 the first one is ``period``. A period of 0 or less never ends.
    """
    return period > 0 and (done - offset) % period == 0 and done > 0 and done >= offset
