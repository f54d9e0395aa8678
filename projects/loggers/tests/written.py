"""One call of a writer."""

from trainkit.utils.events import EventStorage


def write(writer, iter, **scalars):
    with EventStorage(iter) as storage:
        for name, value in scalars.items():
            storage.put_scalar(name, value, smoothing_hint=False)
        writer.write()
