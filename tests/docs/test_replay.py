"""The commands of the example in docs/replay.md print what the page shows, with one process and with two."""

import importlib.util
import shlex

import pytest
from trainkit.projects.replay.tests.job import digest_of_folder

from tests.docs.pages import ROOT, blocks
from tests.forked import run_forked, script

SCRIPT, HOOK = blocks("docs/replay.md", "python")
COMMANDS = [shlex.split(block) for block in blocks("docs/replay.md", "sh")]
AGAIN = ["--", "python", "train.py"]
FAILURE, LAST_LINES, CAPSULE, STEP, PROOF, RANGE = blocks("docs/replay.md", "")


def command(words, folder, num_ranks=1):
    """What ``python script arguments`` or torchrun does."""
    if words[:2] == ["-m", "trainkit.projects.replay"]:
        words = [ROOT / "tools/replay.py", *words[2:]]  # calls the same function
    return run_forked(script(*words), folder, num_ranks=num_ranks)


def assert_shown(shown, printed):
    """The lines are there in this order; "..." stands for some, or for a part of one."""
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        start, dots, end = line.partition("...")
        if line != "...":
            assert any(
                found.startswith(start) and found.endswith(end) if dots else found == line
                for found in lines
            ), line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone")
    (folder / "tools").symlink_to(ROOT / "tools")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "loudness.py").write_text(HOOK)
    return folder


@pytest.mark.slow
def test_the_hunt_prints_what_the_page_shows_and_leaves_the_run_as_it_is(folder):
    train, *replays = (words[1:] for words in COMMANDS)
    failed = command(train, folder)
    assert failed.returncode == 1
    assert FAILURE.partition("...")[0].strip() in failed.stderr
    log = (folder / "output/signals/log.txt").read_text()
    assert LAST_LINES.strip(".\n") in log.replace(f"{folder}/", "")
    before = digest_of_folder(folder / "output/signals")

    for words, shown in zip(replays, (CAPSULE, STEP, PROOF, RANGE), strict=True):
        found = command(words, folder)
        assert found.returncode == 0, found.stderr
        assert_shown(shown, found.stdout)
        assert max(map(len, found.stdout.splitlines()[2:]), default=0) <= 120
    if importlib.util.find_spec("plotly"):
        plot = ["tools/plot_metrics.py", "output/signals", "replay_of_signals"]
        assert command([*plot, "-o", "metrics.html"], folder).returncode == 0
        assert "quietest" in (folder / "metrics.html").read_text()

    assert digest_of_folder(folder / "output/signals") == before


@pytest.mark.slow
def test_a_run_of_two_processes_is_replayed_by_two_and_names_the_rank(folder):
    # metrics are exchanged after iteration 94, in time for its capsule
    options = ["OUTPUT_DIR", "output/two", "LOG.PERIOD", "5"]
    assert command(["train.py", *options], folder, num_ranks=2).returncode == 1

    step = command(["tools/replay.py", "output/two", "--iter", "94", *AGAIN], folder, num_ranks=2)
    proof = command(
        ["tools/replay.py", "output/two", "--iter", "70", "--prove", *AGAIN], folder, num_ranks=2
    )
    alone = command(["tools/replay.py", "output/two", "--iter", "94", *AGAIN], folder)
    capsule = command(
        ["tools/replay.py", "output/two/capsule.rank0.pt", "--bisect", *AGAIN], folder
    )
    hook = ["--range", "60:90", "--hook", "loudness.py:Loudness"]
    hindsight = command(["tools/replay.py", "output/two", *hook, *AGAIN], folder, num_ranks=2)

    assert "rank 0:\nthe step has failed: FloatingPointError" in step.stdout
    assert (
        "first module whose output is not finite: normalize\n  for: signal_237.wav\n" in step.stdout
    )
    assert (step.returncode, proof.returncode, alone.returncode) == (0, 0, 2)
    assert "proof: every byte equals model_0000079.pth: " in proof.stdout
    for text in (
        "failure: it has come back",
        "number of processes: 2 in the run, 1 now",
        "signal_237.wav (1 of 2",
    ):
        assert text in capsule.stdout
    assert (
        "60 of 60 logged values equal those in capsule.rank0.pt, iterations 60 to 89"
        in hindsight.stdout
    )
    assert len((folder / "replay_of_two/metrics.json").read_text().splitlines()) == 30
    assert "the run had 2 processes, and this replay has 1" in alone.stderr
