"""The command line of a replay, and what it leaves alone."""

import pytest
from trainkit.projects.replay import __main__ as tool
from trainkit.projects.replay import replay
from trainkit.projects.replay.tests.job import Job

from trainkit.utils.logger import close_logger, setup_logger


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of 10 iterations, with checkpoints of iterations 4 and 9; ``script`` starts it again."""
    job = Job(tmp_path_factory.mktemp("run"))
    job()
    job.script = job.folder.parent / "script.py"
    job.script.write_text(f"from trainkit.projects.replay.tests.job import Job; Job({str(job.folder)!r})()")
    return job


def call(*words):
    return tool.main(tool.parse_args([*map(str, words)]))


HOOK = """
from trainkit.engine import CallbackHook
Ten = lambda: CallbackHook(after_step=lambda trainer: trainer.storage.put_scalar("ten", 10))
"""


def test_each_question_has_its_options(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HOOK)
    for words, start in [
        (["--iter", 7, "--once"], f"Iteration 7 of {run.folder}, from model_0000004.pth and 2 iterations after it"),
        (["--range", "3:5", "--hook", "mine.py:Ten"], "4 of 4 logged values equal those in model_0000004.pth"),
        (["--range", "3:5", "--worst", 1], "iteration "),
        (["--first-bad", "--quantity", "weight"], "weight stays within 10 times its running median"),
    ]:
        assert call(run.folder, *words, "--", run.script) == 0
        assert start in capsys.readouterr().out.splitlines()[0]
    assert '"ten": 10.0' in (tmp_path / f"replay_of_{run.folder.name}/metrics.json").read_text()


def test_wrong_arguments_end_with_one_line(run, capsys):
    folder, hook = run.folder, f"{__file__}:call"
    for words, message in [
        ([folder], "iter=None, prove=False; accepted: the folder of a run and --iter"),
        ([folder, "--range", "3:4"], "--hook is ''; accepted with --range: FILE.py:CLASS"),
        ([folder, "--range", "4:4"], "argument --range: invalid iterations value: '4:4'"),
        ([folder, "--range", "3:4", "--hook", hook, "--out", folder / "x"], "in the folder of the run, which"),
        ([folder, "--range", "9:11", "--worst", 3, "--", run.script], "--range ends with 11; the run ends with 10;"),
    ]:
        with pytest.raises(SystemExit) as ended:
            call(*words)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_the_loggers_of_the_caller_stay_as_they_are(run, tmp_path):
    logger = setup_logger(tmp_path / "mine.log")
    try:
        replay(run.folder, 7, run)
        logger.info("still here")

        assert (tmp_path / "mine.log").read_text().count("\n") == 1
    finally:
        close_logger()
