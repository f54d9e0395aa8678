"""A checkpoint or a capsule of a stranger chooses no code: the command and IMPORTS in it run only the user's own."""

import os
import shlex
import subprocess
import sys
import zipfile

import pytest
from trainkit.projects.replay import __main__ as tool
from trainkit.projects.replay import replay
from trainkit.projects.replay.origin import describe_origin, describe_other_origin
from trainkit.projects.replay.project import Project, checkout
from trainkit.projects.replay.tests.job import Job, PlantNan

from trainkit.checkpoint.file import read_file, write_file
from trainkit.config import ConfigError, get_cfg, import_modules
from trainkit.engine import default_argument_parser, default_setup

SCRIPT = """
from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, default_argument_parser, default_setup

args = default_argument_parser().parse_args()
cfg = tiny_cfg("output/new")
cfg.merge_from_list(args.opts)
default_setup(cfg, args)
trainer = DefaultTrainer(cfg)
trainer.resume_or_load(False)
trainer.train()
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
    """The current folder, with a script; modules in ``elsewhere`` can be imported, and leave a mark."""
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    for name in ("evil.py", "train.py"):
        (elsewhere / name).write_text(leaves_mark(tmp_path))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(elsewhere)
    yield folder
    sys.modules.pop("evil", None)


def leaves_mark(tmp_path):
    return f"open({str(tmp_path / 'mark')!r}, 'w').close()"


@pytest.fixture
def planted(tmp_path, project, origin_of_all):
    """Makes the files of the run with other contents of their origin; returns their folder, which is in the project."""

    def plant(**changes):
        run = project / "output/run"
        run.mkdir(parents=True)
        for file in ("model_0000004.pth", "capsule.rank0.pt"):
            state = read_file(origin_of_all / file)
            origin = state["trainer"]["origin"]
            origin |= {"argv": ["train.py"], "module": "", "folder": str(project)}
            config = changes.get("config", "")
            origin |= {**changes, "config": f"{origin['config']}{config}".replace("IMPORTS: []\n", "", bool(config))}
            write_file(state, run / file)
        return run

    yield plant
    assert not (tmp_path / "mark").exists()


def command_of(mark):
    return ["timeit", "-n1", "-r1", leaves_mark(mark)]


def repeat(run, start=None):
    return replay(run, 5, start, verdict=False)


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize("is_capsule", [False, True])
@pytest.mark.parametrize("module", ["timeit", "torch.distributed.run", "tools.sweep", "evil", "os", "a-b", "trainkit"])
def test_a_module_that_is_not_in_the_project_is_shown_and_not_run(planted, tmp_path, module, is_capsule):
    run = planted(module=module, argv=command_of(tmp_path), folder=str(tmp_path / "elsewhere"))

    with pytest.raises(ConfigError) as refused:
        replay(run / "capsule.rank0.pt") if is_capsule else repeat(run)

    text = str(refused.value)
    words = shlex.join(["python", "-m", module, *command_of(tmp_path)[1:]])
    assert f"was started by: {words} - but this module is not in the project '{os.getcwd()}'" in text
    assert "give it to the replay (`-- python train.py`)" in text
    assert "\n" not in text


def place_a_link(project, elsewhere, run):
    (project / "link.py").symlink_to(elsewhere / "evil.py")
    return "link.py"


def place_in_an_environment(project, elsewhere, run):
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/pyvenv.cfg").touch()
    (project / ".venv/bin/run.py").write_text((elsewhere / "evil.py").read_text())
    return ".venv/bin/run.py"


def place_in_site_packages(project, elsewhere, run):
    (project / "env/site-packages").mkdir(parents=True)
    (project / "env/site-packages/run.py").write_text((elsewhere / "evil.py").read_text())
    return "env/site-packages/run.py"


def place_in_the_run(project, elsewhere, run):
    (run / "evil.py").write_text((elsewhere / "evil.py").read_text())
    return "output/run/evil.py"


def place_in_an_archive(project, elsewhere, run):
    with zipfile.ZipFile(project / "weights.pth", "w") as file:
        file.writestr("__main__.py", (elsewhere / "evil.py").read_text())
    return "weights.pth"


PLACES = [
    place_a_link,
    place_in_an_environment,
    place_in_site_packages,
    place_in_the_run,
    place_in_an_archive,
    lambda project, elsewhere, run: str(elsewhere / "evil.py"),
    lambda project, elsewhere, run: "../elsewhere/evil.py",
    lambda project, elsewhere, run: subprocess.__file__,
    lambda project, elsewhere, run: "missing.py",
    lambda project, elsewhere, run: "nul\0.py",
    lambda project, elsewhere, run: "",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_script_that_is_not_in_the_project_is_not_run(planted, project, tmp_path, place):
    run = planted()
    path = place(project, tmp_path / "elsewhere", run)
    for file in run.glob("*.p*t*"):
        state = read_file(file)
        state["trainer"]["origin"]["argv"] = [path]
        write_file(state, file)

    with pytest.raises(ConfigError, match="but this script is not a Python file of the project"):
        repeat(run)


def test_the_tools_of_trainkit_that_start_commands_are_not_run(planted, monkeypatch):
    root = str(checkout())
    run = planted(argv=[f"{root}/tools/sweep.py", "out", "SEED=0,1", "--", "IMPORTS", "[evil]"], folder=root)
    monkeypatch.chdir(root)

    with pytest.raises(ConfigError, match="but this script is not a Python file of the project"):
        repeat(run)
    assert Project().has_script("tools/train_net.py")


def test_a_recorded_folder_outside_of_the_project_is_not_entered(planted, tmp_path, capsys):
    run = planted(folder=str(tmp_path / "elsewhere"))

    assert repeat(run).iteration == 5  # with train.py of the project, not that of the folder

    assert f"Running again: python {tmp_path}/project/train.py (from {tmp_path}/project)" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"argv": []}, {"argv": [1]}, {"argv": "x"}, {"module": 1}, {"folder": None}])
def test_an_origin_of_other_contents_is_one_message(planted, changes):
    with pytest.raises(ConfigError, match=r"does not hold the command of its run; give it \(`-- python train.py`\)"):
        repeat(planted(**changes))


@pytest.mark.parametrize(
    "word", ["../elsewhere/evil.py", "--config-file={}/evil.py", "{}/evil.py:Hook", "[a, '{}/evil.py']"]
)
def test_an_argument_that_names_python_code_outside_of_the_project_is_refused(planted, tmp_path, word):
    run = planted(argv=["train.py", "--config-file", word.format(tmp_path / "elsewhere")])

    with pytest.raises(ConfigError, match="but '.*/evil.py' is not in the project"):
        repeat(run)


def test_a_command_that_is_a_replay_is_refused(planted, project):
    (project / "again.py").write_text(
        f"from trainkit.projects.replay import replay; replay({str(project / 'output/run')!r}, 5)"
    )

    with pytest.raises(ConfigError, match="the command of the run is a replay"):
        repeat(planted(argv=["again.py"]))


def test_a_recorded_command_starts_no_processes(planted, project):
    (project / "train.py").write_text(f"import sys; open('words', 'w').write(repr(sys.argv[1:]))\n{SCRIPT}")
    several = ["--num-gpus", "2", "--num-machines=2", "--machine-rank", "1", "--dist-url", "tcp://stranger:1"]

    repeat(planted(argv=["train.py", *several, "--", "SEED", "1"]))

    one = ["--num-gpus", "1", "--num-machines", "1", "--machine-rank", "0"]
    assert (project / "words").read_text() == repr([*several, *one, "--", "SEED", "1"])


# ---------------------------------------------------------------------- IMPORTS


@pytest.mark.parametrize(
    "name", ["evil", "antigravity", "os.path", "json.tool", "torch.utils", "__main__", "not_there"]
)
def test_modules_of_a_checkpoint_that_are_not_in_the_project_are_not_imported(planted, name):
    run = planted(config=f"IMPORTS: [{name}]\n")

    for start in (None, ["python", "train.py"]):
        with pytest.raises(ConfigError) as refused:
            repeat(run, start)
        assert f"IMPORTS of the run has '{name}', which is not in the project" in str(refused.value)
        assert f"name the modules in your own command: IMPORTS \"['{name}']\"" in str(refused.value)


def test_modules_in_the_arguments_of_a_checkpoint_are_not_imported(planted):
    run = planted(argv=["train.py", "IMPORTS", "[evil]"], config="IMPORTS: [evil]\n")

    with pytest.raises(ConfigError, match="IMPORTS of the run has 'evil'"):
        repeat(run)


def test_modules_in_the_arguments_of_a_checkpoint_are_not_imported_by_a_script_that_does_it_early(planted, project):
    (project / "early.py").write_text(
        "import sys\nfrom trainkit.config import import_modules\nimport_modules(sys.argv[1:])"
    )

    with pytest.raises(ConfigError, match="IMPORTS of the run has 'evil'"):
        repeat(planted(argv=["early.py", "evil"]))


def test_modules_of_the_project_are_imported(planted, project, monkeypatch):
    (project / "package/inner").mkdir(parents=True)
    (project / "package/inner/mine.py").write_text("")
    run = planted(config="IMPORTS: [package.inner.mine, trainkit.utils]\n")
    monkeypatch.syspath_prepend(project)

    assert repeat(run).iteration == 5

    assert "package.inner.mine" in sys.modules


def test_modules_that_the_users_own_command_names_too_are_imported(planted, tmp_path):
    (tmp_path / "elsewhere/evil.py").write_text("")

    assert repeat(planted(config="IMPORTS: [evil]\n"), ["python", "train.py", "IMPORTS", "[evil]"]).iteration == 5

    assert "evil" in sys.modules


def test_a_fork_does_not_import_what_its_parent_names(planted, tmp_path):
    run, other = planted(config="IMPORTS: [evil]\n"), str(tmp_path / "fork")

    def fork(*options):
        args = default_argument_parser().parse_args(["--fork", f"{run}@5", "OUTPUT_DIR", other, *options])
        cfg = get_cfg()
        cfg.merge_from_list(args.opts)
        default_setup(cfg, args)
        return cfg

    with pytest.raises(ConfigError, match="IMPORTS of the run has 'evil'"):
        fork()
    assert fork("IMPORTS", "[json]").IMPORTS == ["json"]
    assert import_modules(["json"]) is None  # no check stays after a replay or a fork


def test_the_settings_of_a_checkpoint_do_not_inherit_from_files(planted, project):
    (project / "base.yaml").write_text("SEED: 3\n")

    with pytest.raises(ConfigError, match="_BASE_"):
        repeat(planted(config="_BASE_: base.yaml\nIMPORTS: []\n"))


# ---------------------------------------------------------------------- the files


def test_files_out_of_the_project_are_neither_recorded_nor_read(project, tmp_path):
    (project / "mine.py").write_text("")
    (project / "link.py").symlink_to("/dev/zero")
    os.mkfifo(project / "pipe.py")
    origin = describe_origin("", None, None)
    names = ["/dev/zero", "../elsewhere/evil.py", "../gone.py", f"{tmp_path}/elsewhere/evil.py", "link.py", "pipe.py"]

    files = {**dict.fromkeys([*names, "train.txt"], "1"), "mine.py": "1", "gone.py": "1"}
    found = describe_other_origin({**origin, "files": files}, None)

    assert origin["files"].keys() == {"trainkit"}  # modules in elsewhere and of the tests are not in the project
    assert found == ["code: mine.py is another one now", "code: gone.py is not there now"]


# ---------------------------------------------------------------------- what runs


def call(*words):
    return tool.main(tool.parse_args([*map(str, words)]))


@pytest.mark.parametrize(
    "command",
    [[], ["--", "python", "train.py"], ["--", sys.executable, "-m", "train"], ["--", "train.py"]],
)
def test_the_command_in_the_project_needs_no_words_and_another_one_is_given_after_dashes(planted, capsys, command):
    # the given command does not depend on what the file says
    run = planted() if not command else planted(module="timeit", argv=["timeit"])

    assert call(run, "--iter", 5, "--once", "--json", *command) == 0

    shown = f"Running again: python {os.getcwd()}/train.py (from {os.getcwd()})\n"
    assert (shown in capsys.readouterr().err) == (not command)


def test_a_module_of_the_project_runs_and_a_capsule_too(planted, project):
    (project / "jobs").mkdir()
    (project / "jobs/__main__.py").write_text(SCRIPT)
    run = planted(module="jobs", argv=[str(project / "jobs/__main__.py")])

    assert (repeat(run).iteration, replay(run / "capsule.rank0.pt").iteration) == (5, 7)


def test_the_project_is_the_top_folder_with_git(project, monkeypatch):
    (project / ".git").touch()  # a file in a worktree
    (project / "deep/er").mkdir(parents=True)
    monkeypatch.chdir(project / "deep/er")

    assert Project().folder == project
    assert Project().has_script("../../train.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "got -- without a command; give one"),
        (["--", "python"], "the command is 'python'; accepted: python FILE ..., python -m MODULE ..."),
        (["--", "python", "-c", "print()"], "accepted: python FILE ..., python -m MODULE ... or FILE ..."),
        (["--", "missing.py"], "with a file that is there"),
    ],
)
def test_another_command_is_one_message(planted, capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        call(planted(), "--iter", 5, *words)

    assert ended.value.code == 2
    assert message in capsys.readouterr().err
