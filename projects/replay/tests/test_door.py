"""A checkpoint or a capsule of a stranger chooses no code: the command and IMPORTS are those of the user."""

import sys

import pytest
from trainkit.projects.replay import __main__ as tool
from trainkit.projects.replay import replay
from trainkit.projects.replay.origin import describe_origin, describe_other_origin
from trainkit.projects.replay.tests.job import Job, PlantNan

from trainkit.checkpoint.file import read_file, write_file
from trainkit.config import ConfigError, get_cfg
from trainkit.engine import default_argument_parser, default_setup

SCRIPT = """
import sys
from trainkit.projects.replay.tests.job import train
open("words", "w").write(repr(sys.argv[1:]))
train("output/new", *sys.argv[1:])
"""


@pytest.fixture(scope="module")
def origin_of_all(tmp_path_factory):
    """The files of a run that has failed in iteration 7, with a checkpoint of iteration 4 and a capsule."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.raises(FloatingPointError):
        Job(folder, make_hooks=lambda: [PlantNan("layers.0.weight", 7)])()
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder, with a script; the module ``evil`` can be imported, and leaves a mark."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text(SCRIPT)
    (tmp_path / "evil.py").write_text(leaves_mark(tmp_path))
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "project"
    sys.modules.pop("evil", None)


def leaves_mark(tmp_path):
    return f"open({str(tmp_path / 'mark')!r}, 'w').close()"


@pytest.fixture
def planted(tmp_path, project, origin_of_all):
    """Makes the files of the run with other contents of their origin; returns their folder, which is in the project."""

    def plant(config="", **changes):
        run = project / "output/run"
        run.mkdir(parents=True)
        for file in ("model_0000004.pth", "capsule.rank0.pt"):
            state = read_file(origin_of_all / file)
            origin = state["trainer"]["origin"]
            text = origin["config"].replace("IMPORTS: []\n", config or "IMPORTS: []\n")
            origin |= {"argv": ["train.py"], "module": "", "folder": str(project), **changes, "config": text}
            write_file(state, run / file)
        return run

    yield plant
    assert not (tmp_path / "mark").exists()


def call(*words):
    return tool.main(tool.parse_args([*map(str, words)]))


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("module", "argv", "shown"),
    [
        ("timeit", ["timeit", "-n1", "-r1", "MARK"], "python -m timeit -n1 -r1 'open("),
        ("evil", ["evil"], "python -m evil"),
        ("", ["../evil.py"], "python ../evil.py"),
        ("", ["train.py"], "python train.py"),  # the user's own is not run unasked either
        ("", ["\x1b[2J\n.py"], "python '\\x1b[2J\\n.py'"),
        ("", 1, "(not known)"),
    ],
)
def test_a_recorded_command_is_shown_and_never_run(planted, project, tmp_path, capsys, module, argv, shown):
    argv = [word.replace("MARK", leaves_mark(tmp_path)) for word in argv] if isinstance(argv, list) else argv
    run = planted(module=module, argv=argv)

    for words in ([run, "--iter", 5], [run / "capsule.rank0.pt"]):
        with pytest.raises(SystemExit) as ended:
            call(*words)
        assert ended.value.code == 2
        assert f"says that it was: {shown}" in capsys.readouterr().err
    assert not (project / "words").exists()


@pytest.mark.parametrize("command", [["python", "train.py"], [sys.executable, "-m", "train"], ["train.py"]])
def test_the_command_that_is_given_runs_whatever_the_file_says(planted, project, command):
    run = planted(module="timeit", argv=["timeit"])
    several = ["--num-gpus", "2", "--num-machines=2", "--machine-rank", "1", "--dist-url", "tcp://stranger:1"]

    assert call(run, "--iter", 5, "--once", "--", *command, *several, "--", "SEED", "1") == 0

    one = ["--num-gpus", "1", "--num-machines", "1", "--machine-rank", "0"]  # no other process is started
    assert (project / "words").read_text() == repr([*several, *one, "--", "SEED", "1"])


@pytest.mark.parametrize("words", [[], ["python"], ["python", "-c", "print()"], ["missing.py"], ["python", "-m"]])
def test_another_command_is_one_message(planted, capsys, words):
    with pytest.raises(SystemExit) as ended:
        call(planted(), "--iter", 5, "--", *words)

    assert ended.value.code == 2
    accepted = "accepted: python FILE ..., python -m MODULE ... or FILE ..." if words else "give the command of the run"
    assert accepted in capsys.readouterr().err


# ---------------------------------------------------------------------- IMPORTS


def test_modules_of_a_checkpoint_are_imported_only_if_the_users_own_command_names_them(planted, tmp_path):
    run = planted(config="IMPORTS: [evil]\n")

    for file, iter in ((run, 5), (run / "capsule.rank0.pt", None)):
        with pytest.raises(ConfigError, match=r"IMPORTS of the run is \['evil'\], .* add to your command: IMPORTS"):
            replay(file, iter, ["python", "train.py"], verdict=False)
    assert "evil" not in sys.modules

    (tmp_path / "evil.py").write_text("")
    replay(run, 5, ["python", "train.py", "IMPORTS", "[evil]"], verdict=False)
    assert "evil" in sys.modules


def test_a_fork_does_not_import_what_its_parent_names(planted, tmp_path):
    run, other = planted(config="IMPORTS: [evil]\n"), str(tmp_path / "fork")

    def fork(*options):
        args = default_argument_parser().parse_args(["--fork", f"{run}@5", "OUTPUT_DIR", other, *options])
        cfg = get_cfg()
        cfg.merge_from_list(args.opts)
        default_setup(cfg, args)
        return cfg

    with pytest.raises(ConfigError, match=r"IMPORTS of the run is \['evil'\]"):
        fork()
    assert fork("IMPORTS", "[json]").IMPORTS == ["json"]


def test_the_settings_of_a_checkpoint_do_not_inherit_from_files(planted, project):
    (project / "base.yaml").write_text("SEED: 3\n")

    with pytest.raises(ConfigError, match="_BASE_"):
        replay(planted(config="_BASE_: base.yaml\nIMPORTS: []\n"), 5, ["train.py"], verdict=False)


# ---------------------------------------------------------------------- the files


def test_files_that_a_checkpoint_names_are_not_opened(project, monkeypatch):
    (project / "mine.py").write_text("")
    (project / "link.py").symlink_to("/dev/zero")
    monkeypatch.syspath_prepend(project)
    __import__("mine")
    origin = describe_origin("", None)
    names = ["/dev/zero", "link.py", "../evil.py"]

    found = describe_other_origin({**origin, "files": {**dict.fromkeys(names, "1"), "mine.py": "1"}}, None)

    assert origin["files"].keys() == {"trainkit", "mine.py"}  # of the current folder only
    assert found == [*(f"code: {name} is not imported now" for name in names), "code: mine.py is another one now"]
