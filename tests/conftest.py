"""Settings of the whole suite."""

import gc
import itertools
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import trainkit.data
from trainkit.utils import comm
from trainkit.utils.logger import close_logger
from trainkit.utils.plugins import find_plugins

# tiny models only lose by more threads, most of all when something else runs on the machine
torch.set_num_threads(1)

# the files that take longest, in this order
LONGEST = [
    *("tests/fake_cuda/test_run", "projects/sharding/tests/test_fsdp"),
    *("tests/docs/test_replay", "projects/replay/tests/test_replay", "tests/docs/test_sweep"),
    *(
        "projects/preflight/tests/test_preflight",
        "tests/exactness/test_exactness",
        "tests/engine/test_restarts",
    ),
    *(
        "tests/docs/test_commands",
        "tests/test_package",
        "tests/tools/test_benchmark",
        "tests/tools/test_resume",
    ),
]


def pytest_configure(config):
    """Files run in their order: by the number of its tests a file with a few long ones would be the last."""
    if hasattr(config.option, "loadscopereorder"):  # of pytest-xdist
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """The longest files first: at the end one of them would keep one worker while the others have nothing left."""
    first = {f"{name}.py": place for place, name in enumerate(LONGEST)}
    others = {True: len(first), False: len(first) + 1}

    def place(item):
        file = item.nodeid.partition("::")[0]
        return first.get(file, others[file.startswith("tests/tools/")])

    items.sort(key=place)


@pytest.fixture(autouse=True)
def one_thread():
    """A resumed job may have taken over more threads; a process that is forked then hangs in torch."""
    yield
    torch.set_num_threads(1)


def pytest_collection_finish():
    """What is imported and collected stays: a garbage collection, of which jobs do many, need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def closed_log():
    """A job that a test has set up does not log in the next one."""
    yield
    close_logger()
    comm.set_data_ranks()


@pytest.fixture
def catalogs():
    """What a test registers is gone after it."""
    both = trainkit.data.DatasetCatalog, trainkit.data.MetadataCatalog
    before = [dict(catalog) for catalog in both]
    yield
    for catalog, entries in zip(both, before, strict=True):
        catalog.clear()
        catalog.update(entries)


@pytest.fixture
def plug_in(tmp_path_factory, monkeypatch):
    """Install a package whose module ``plugin`` has some text, for one test, as pip would."""
    packages = []

    def plug_in(package, text):
        packages.append(package)
        folder = tmp_path_factory.mktemp("installed")
        metadata = folder / f"{package}-1.0.dist-info"
        (folder / package).mkdir()
        metadata.mkdir()
        (folder / package / "__init__.py").touch()
        (folder / package / "plugin.py").write_text(text)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text(
            f"[trainkit.projects]\n{package} = {package}.plugin\n"
        )
        monkeypatch.syspath_prepend(folder)
        find_plugins.cache_clear()
        return folder / package

    yield plug_in
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages:
            del sys.modules[name]
    find_plugins.cache_clear()


@pytest.fixture
def as_rank(monkeypatch):
    """Make this process look like one rank of several to whatever is built afterwards."""

    def as_rank(rank, world_size):
        monkeypatch.setattr(comm, "get_rank", lambda: rank)
        monkeypatch.setattr(comm, "get_world_size", lambda: world_size)

    return as_rank


@pytest.fixture
def save_format():
    """The format in which checkpoints are saved; a project runs some tests in its own format."""
    return ""


@pytest.fixture
def forked_ranks(monkeypatch):
    """The ranks that `launch` starts are forked from this process, in no time: new ones would import torch."""
    start = torch.multiprocessing.start_processes

    def fork(*args, **kwargs):
        gc.collect()  # a store of an earlier test that a rank would free waits for a thread that only this process has
        handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.SIG_DFL)
        handlers[signal.SIGINT] = signal.default_int_handler  # as in a new process
        former = {each: signal.signal(each, handler) for each, handler in handlers.items()}
        try:
            return start(*args, **{**kwargs, "start_method": "fork"})
        finally:
            for each, handler in former.items():
                signal.signal(each, handler)

    monkeypatch.setattr(torch.multiprocessing, "start_processes", fork)


@pytest.fixture
def seconds(monkeypatch):
    """Each file of events starts in a second of its own, as with processes: its name has to tell the order."""
    clock = itertools.count(1_700_000_000)
    time_of_files = SimpleNamespace(time=lambda: next(clock), sleep=time.sleep)
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", time_of_files)
