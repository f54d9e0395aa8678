"""The command line; a checkpoint or a capsule of a stranger chooses no code: command and IMPORTS are the user's."""

import sys

import pytest
from trainkit.projects.replay import __main__ as tool
from trainkit.projects.replay import replay
from trainkit.projects.replay.origin import describe_origin, describe_other_origin
from trainkit.projects.replay.tests.job import Job, plant_nan, train

from trainkit.checkpoint.file import read_file, write_file
from trainkit.config import ConfigError

SCRIPT = """
import sys
from trainkit.projects.replay.tests.job import train
open("words", "w").write(repr(sys.argv[1:]))
train("output/new", *sys.argv[1:])
"""

NO_COMMANDS = (["python"], ["python", "-c", "print()"], ["missing.py"], ["python", "-m"])


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory):
    """The files of a run that has failed in iteration 7, with a checkpoint of iteration 4 and a capsule."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.raises(FloatingPointError):
        Job(folder, make_hooks=lambda: [plant_nan("layers.0.weight", 7)])()
    return folder


@pytest.fixture
def plant(tmp_path, monkeypatch, failed_run):
    """Makes a run with another origin in the current folder. The module ``evil`` can be imported, and leaves a mark."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    (tmp_path / "evil.py").write_text(leaves_mark(tmp_path))
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(tmp_path)

    def make(config="", **changes):
        run = project / "output/run"
        run.mkdir(parents=True)
        for file in ("model_0000004.pth", "capsule.rank0.pt"):
            state = read_file(failed_run / file)
            text = state["trainer"]["origin"]["config"].replace(
                "IMPORTS: []\n", config or "IMPORTS: []\n"
            )
            state["trainer"]["origin"] |= {
                "argv": ["train.py"],
                "module": "",
                **changes,
                "config": text,
            }
            write_file(state, run / file)
        return run

    yield make
    sys.modules.pop("evil", None)
    assert not (tmp_path / "mark").exists()


def leaves_mark(tmp_path):
    return f"open({str(tmp_path / 'mark')!r}, 'w').close()"


def refused(capsys, *words):
    """The one message with which a call ends."""
    with pytest.raises(SystemExit) as ended:
        tool.main(tool.parse_args([*map(str, words)]))
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "argv", "shown"),
    [
        ("timeit", ["timeit", "-n1", "-r1", "MARK"], "python -m timeit -n1 -r1 'open("),
        ("", ["train.py"], "python train.py"),  # the user's own is not run unasked either
        ("", ["\x1b[2J\n.py"], "python '\\x1b[2J\\n.py'"),
        ("", 1, "(not known)"),
    ],
)
def test_a_recorded_command_is_shown_and_never_run(plant, tmp_path, capsys, module, argv, shown):
    argv = (
        [word.replace("MARK", leaves_mark(tmp_path)) for word in argv]
        if isinstance(argv, list)
        else argv
    )
    run = plant(module=module, argv=argv)

    for words in ([run, "--iter", 5], [run / "capsule.rank0.pt"]):
        assert f"after `--`; '{words[0]}' says that it was: {shown}" in refused(capsys, *words)
    assert not (tmp_path / "project/words").exists()


def test_the_command_that_is_given_runs_in_this_process_whatever_the_file_says(plant, tmp_path):
    run = plant(module="timeit", argv=["timeit"])
    several = [
        "--num-gpus",
        "2",
        "--num-machines=2",
        "--machine-rank",
        "1",
        "--dist-url",
        "tcp://stranger:1",
    ]
    one = ["--num-gpus", "1", "--num-machines", "1", "--machine-rank", "0"]

    for command in (["python", "train.py"], [sys.executable, "-m", "train"], ["train.py"]):
        words = [str(run), "--iter", "5", "--once", "--", *command, *several, "--", "SEED", "1"]
        assert tool.main(tool.parse_args(words)) == 0
        assert (tmp_path / "project/words").read_text() == repr([*several, *one, "--", "SEED", "1"])


HOOK = """
from trainkit.engine import CallbackHook
Ten = lambda: CallbackHook(after_step=lambda trainer: trainer.storage.put_scalar("ten", 10))
"""


def test_each_question_has_its_options(plant, capsys, tmp_path):
    run = plant()
    (tmp_path / "project/mine.py").write_text(HOOK)
    for words, start in [
        (
            ["--iter", "5", "--once"],
            f"Iteration 5 of {run}, from model_0000004.pth and 0 iterations after it",
        ),
        (
            ["--range", "5:7", "--hook", "mine.py:Ten"],
            "4 of 4 logged values equal those in capsule.rank0.pt",
        ),
        (["--range", "5:6", "--hook", "mine.py:Ten", "--out", "own"], "2 of 2 logged values"),
        (["--range", "5:7", "--worst", "1"], "iteration "),
        (
            ["--first-bad", "--iter", "6", "--quantity", "weight", "--times", "3"],
            "weight stays within 3 times its running median",
        ),
    ]:
        assert tool.main(tool.parse_args([str(run), *words, "--", "train.py"])) == 0
        assert start in capsys.readouterr().out.splitlines()[0]
    assert tool.main(tool.parse_args([str(run), "--first-bad", "--", "train.py"])) == 1
    assert "it has not come back: in the run iteration 7 has ended" in capsys.readouterr().out
    for folder, num_lines in (("replay_of_run", 2), ("own", 1)):
        text = (tmp_path / "project" / folder / "metrics.json").read_text()
        assert text.count('"ten": 10.0') == num_lines


def test_wrong_arguments_are_one_message(plant, capsys):
    run, hook = plant(), f"{__file__}:refused"
    for words, message in [
        ([], "iter=None, prove=False; accepted: the folder of a run and --iter"),
        (["--range", "3:4"], "--hook is ''; accepted with --range: FILE.py:CLASS"),
        (["--range", "4:4"], "argument --range: invalid iterations value: '4:4'"),
        (["--range", "3:4", "--hook", hook, "--out", run / "x"], "in the folder of the run, which"),
        (
            ["--range", "9:11", "--worst", 3, "--", "train.py"],
            "--range ends with 11; the run ends with 10;",
        ),
        *(
            (["--iter", 5, "--", *words], "accepted: python FILE ..., python -m MODULE ...")
            for words in NO_COMMANDS
        ),
    ]:
        assert message in refused(capsys, run, *words)


def test_modules_of_a_checkpoint_are_imported_only_if_the_users_own_command_names_them(
    plant, tmp_path
):
    run = plant(config="IMPORTS: [evil]\n")
    refusal = r"IMPORTS of the run is \['evil'\], .* add to your command: IMPORTS"

    for file, iter in ((run, 5), (run / "capsule.rank0.pt", None)):
        with pytest.raises(ConfigError, match=refusal):
            replay(file, iter, ["python", "train.py"], verdict=False)
    with pytest.raises(ConfigError, match=refusal):
        train(tmp_path / "fork", "--fork", f"{run}@5")
    assert "evil" not in sys.modules

    (tmp_path / "evil.py").write_text("")
    replay(run, 5, ["python", "train.py", "IMPORTS", "[evil]"], verdict=False)
    assert "evil" in sys.modules
    assert train(tmp_path / "fork", "--fork", f"{run}@5", "IMPORTS", "[json]").cfg.IMPORTS == [
        "json"
    ]


def test_the_settings_of_a_checkpoint_do_not_inherit_from_files(plant, tmp_path):
    (tmp_path / "project/base.yaml").write_text("SEED: 3\n")

    with pytest.raises(ConfigError, match="_BASE_"):
        replay(plant(config="_BASE_: base.yaml\nIMPORTS: []\n"), 5, ["train.py"], verdict=False)


def test_files_that_a_checkpoint_names_are_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "link.py").symlink_to("/dev/zero")
    __import__("mine")
    origin = describe_origin("", None)
    names = ["/dev/zero", "link.py", "../evil.py"]
    found = describe_other_origin(
        {**origin, "files": {**dict.fromkeys(names, "1"), "mine.py": "1"}}, None
    )
    assert origin["files"].keys() == {"trainkit", "mine.py"}  # of the current folder only
    assert found == [
        *(f"code: {name} is not imported now" for name in names),
        "code: mine.py is another one now",
    ]
