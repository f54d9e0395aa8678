"""Any step of a past run is performed again, from its checkpoints, and equals the run to the last bit."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainkit.projects.graph.tests.recorded_graph import CpuRecorder
from trainkit.projects.replay import replay, replay_range
from trainkit.projects.replay.inspection import Inspection, is_on_the_way, judge
from trainkit.projects.replay.step import find_samples
from trainkit.projects.replay.tests.job import Job, Keep, digest_of_folder, plant_nan, stop_at

from tests.cuda import needs_cuda
from tests.docs.pages import ROOT
from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file, write_file
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer, GraphTrainer
from trainkit.engine.hooks import CallbackHook
from trainkit.modeling import MODEL_REGISTRY

pytestmark = pytest.mark.slow  # each test trains and replays in several ways

SAME = "repeated in this process, every bit is equal"
REPRODUCIBLE = f"reproducible: {SAME}; not repeated in a new process: no command is given"
TOP1 = "classification/top1"


def proof(name):
    return f"every byte equals {name}: model, optimizer, random state, data, hooks, storage"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of 10 iterations, with checkpoints of iterations 4 and 9."""
    job = Job(tmp_path_factory.mktemp("run"))
    job()
    return job


def changed_copy(run, folder, change):
    """A copy of the files of a run, with ``change(state)`` made to the last checkpoint."""
    for file in run.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    state = read_file(folder / "model_final.pth")
    change(state)
    write_file(state, folder / "model_final.pth")
    return folder


def draw_and_build(cfg):
    """As a script that draws itself before it builds its trainer; with SEED -1 the seed was drawn before that."""
    torch.rand(3)
    return DefaultTrainer(cfg)


def test_a_replayed_step_has_the_batch_the_losses_and_the_gradients_of_the_run_which_is_not_changed(
    tmp_path,
):
    kept, options = Keep(), ("SEED", -1)
    Job(tmp_path, *options, make_hooks=lambda: [kept], base=draw_and_build)()
    folder = digest_of_folder(tmp_path)

    for iter, start, after in (
        (0, "the beginning", "model_0000004.pth"),
        (9, "model_0000004.pth", "model_final.pth"),
    ):
        found = replay(tmp_path, iter, Job(tmp_path, *options, base=draw_and_build), prove=True)

        batch, gradients = kept.xs[iter], kept.gradients[iter]
        assert torch.equal(found.batch["x"], batch)
        assert found.losses == kept.losses[iter]
        assert found.gradients.keys() == gradients.keys()
        assert all(torch.equal(found.gradients[name], gradients[name]) for name in gradients)
        assert found.verdict == REPRODUCIBLE
        assert found.differences == []
        assert found.start == start
        assert (
            found.error == found.first_bad_module == found.first_bad_gradient == found.failure == ""
        )
        words = " ".join(str(found).split())
        assert f"layers.0.weight {gradients['layers.0.weight'].norm().item():.4g}" in words
        assert f"x [8, 4] torch.float32 {batch.min():.4g}" in words
        assert words.endswith(f"proof: {proof(after)} verdict: {REPRODUCIBLE}")
    assert digest_of_folder(tmp_path) == folder


def check_step_of_a_graph(tmp_path, device):
    job = Job(
        tmp_path,
        "MODEL.DEVICE",
        device,
        "SOLVER.GRAPH.ENABLED",
        True,
        "SOLVER.OPTIMIZER.FUSED",
        True,
    )
    job()

    found = replay(tmp_path, 8, job, prove=True)

    assert found.verdict == REPRODUCIBLE
    assert found.proof == proof("model_final.pth")
    assert [name for name, _ in found.inspection.outputs] == [
        *(f"layers.{i}" for i in range(5)),
        "layers",
        "(model)",
    ]
    assert found.batch["x"].device.type == device


def test_a_step_of_a_run_with_a_graph_is_repeated_with_all_its_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(GraphTrainer, "make_recorder", lambda self: CpuRecorder())
    check_step_of_a_graph(tmp_path, "cpu")


@needs_cuda
def test_a_step_on_a_gpu_is_repeated_and_proved_there(tmp_path):
    check_step_of_a_graph(tmp_path, "cuda")


def test_a_nan_in_a_weight_is_found_with_its_name_and_module_also_before_the_first_checkpoint(
    tmp_path,
):
    options = ("SOLVER.CHECKPOINT_PERIOD", 100, "DATASETS.TEST", ())
    job = Job(tmp_path, *options, make_hooks=lambda: [plant_nan("layers.4.bias", 7)])
    with pytest.raises(FloatingPointError):
        job()

    found = replay(tmp_path, 7, job)

    assert found.inspection.not_finite_before == ["layers.4.bias"]
    assert found.first_bad_module == "layers.4"
    assert found.error.startswith("FloatingPointError: the loss is not finite in iteration 7")
    assert found.verdict == REPRODUCIBLE
    assert found.start == "the beginning"
    assert found.on_the_way.startswith("14 of 14 logged values equal those in capsule.rank0.pt")
    assert found.on_the_way.endswith("iterations 0 to 6")
    with pytest.raises(CheckpointError, match="has no checkpoint after iteration"):
        replay(tmp_path, 7, job, prove=True)


def test_a_nan_in_a_sample_is_found_with_the_name_that_the_dataset_gives_it(tmp_path):
    lists = (
        "MODEL.NAME",
        "ListClassifier",
        "DATALOADER.COLLATE",
        "list",
        "SOLVER.ACCUMULATION_STEPS",
        2,
    )
    policy = (
        "SOLVER.NON_FINITE.POLICY",
        "skip",
        "SOLVER.MAX_ITER",
        5,
        "SOLVER.STEPS",
        (),
        "DATASETS.TEST",
        (),
    )
    job = Job(tmp_path, *lists, *policy, "DATASETS.TRAIN", ("tiny_scans",))
    job()
    steps = [replay(tmp_path, iter, job, verdict=False) for iter in range(5)]

    for found in steps:
        is_hit = "scan_017.png" in found.samples
        assert found.inspection.bad_samples == ["scan_017.png"] * is_hit
        assert found.inspection.samples_of_first_bad_output == found.inspection.bad_samples
        assert found.first_bad_gradient == "layers.4.bias" * is_hit
        assert len(found.samples) == 16
    assert sum("scan_017.png" in found.samples for found in steps) == 2  # 5 steps are two epochs


def test_no_innocent_sample_is_named():
    seen, values = Inspection([["a", "b", "c"]]), torch.tensor([1.0, float("nan"), 1.0])
    seen.batches = [[values, torch.zeros(3)]]  # torch's default_collate makes this of tuples
    step = SimpleNamespace(
        model=nn.Identity(),
        data_loader=[],
        compute_losses=lambda batch: SimpleNamespace(total=values[1]),
    )
    alone = [find_samples(step, torch.zeros(size), [])[1] for size in (1, 3)]
    assert seen.bad_samples == ["b"]
    text = "the loss is not finite with each of the {} samples alone, so this names none of them"
    assert alone == [text.format(size) for size in (1, 3)]


@pytest.mark.parametrize(
    ("iter", "options"),
    [
        (
            7,
            [
                "SOLVER.ACCUMULATION_STEPS",
                2,
                "SOLVER.IMS_PER_BATCH",
                4,
                "SOLVER.OPTIMIZER.NAME",
                "AdamW",
                "SEED",
                -1,
            ],
        ),
        (
            2,
            [
                "SOLVER.AMP.ENABLED",
                True,
                "SOLVER.AMP.PRECISION",
                "bfloat16",
                "DATALOADER.NUM_WORKERS",
                2,
            ],
        ),
        (
            7,
            [
                "HOOKS",
                [{"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": "both"}],
                "SOLVER.CLIP_GRADIENTS.ENABLED",
                True,
            ],
        ),
        (
            7,
            [
                "HOOKS",
                [{"NAME": "ReduceOnPlateau", "VAL_METRIC": TOP1, "PATIENCE": 1}],
                "TEST.EVAL_PERIOD",
                2,
            ],
        ),
        # stops after iteration 7
        (
            7,
            [
                "EARLY_STOPPING.METRIC",
                TOP1,
                "EARLY_STOPPING.MIN_DELTA",
                1000.0,
                "TEST.EVAL_PERIOD",
                2,
            ],
        ),
    ],
)
def test_every_byte_of_the_next_checkpoint_is_equal(tmp_path, iter, options):
    job = Job(tmp_path, *options, "CHECKPOINT.BEST_METRIC", TOP1)
    job()
    found = replay(tmp_path, iter, job, prove=True)
    assert found.proof.startswith("every byte equals model_")
    assert found.verdict == REPRODUCIBLE
    assert "logged values equal those" in found.on_the_way
    assert found.is_equal


def test_the_settings_are_those_of_the_process_that_did_the_step(tmp_path):
    """Resuming with another MAX_ITER writes another config.yaml."""
    Job(tmp_path, make_hooks=lambda: [stop_at(6)])()
    Job(tmp_path, "SOLVER.MAX_ITER", 14, "SOLVER.STEPS", (7,))("--resume")
    found = replay(tmp_path, 5, Job(tmp_path, "SOLVER.MAX_ITER", 20), prove=True)
    assert found.proof == proof("model_0000006.pth")
    assert found.differences == [
        "setting SOLVER.MAX_ITER: 10 in the run, which is used; 20 in the command now"
    ]


def test_a_difference_from_the_next_checkpoint_is_named(run, tmp_path):
    def change(state):
        state["model"]["layers.4.bias"][1] += 1e-6
        state["trainer"]["storage"]["histories"]["total_loss"]["values"][5] += 1e-6

    found = replay(changed_copy(run, tmp_path, change), 6, Job(tmp_path), prove=True)
    assert found.on_the_way.startswith("DIFFERENT: total_loss of iteration 5 is ")
    assert found.proof.startswith(
        "DIFFERENT from model_final.pth in model/layers.4.bias: 1 of 2 values"
    )
    assert found.verdict.startswith("different from the run, which has stored other values (")
    assert not found.is_equal


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def empty(path):
    path.write_bytes(b"")


def flip_a_bit_of_a_weight(path):
    content = bytearray(path.read_bytes())
    weight = read_file(path)["model"]["layers.0.weight"].numpy().tobytes()
    content[content.index(weight) + 1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit_of_a_weight])
def test_the_report_names_a_damaged_checkpoint_that_the_replay_would_have_used(tmp_path, damage):
    job = Job(tmp_path, "SOLVER.CHECKPOINT_PERIOD", 2, "DATASETS.TEST", ())
    job()
    for number in (1, 5, 7):
        damage(tmp_path / f"model_000000{number}.pth")

    found = replay(tmp_path, 6, job)
    ranged = replay_range(tmp_path, 6, 7, CallbackHook, tmp_path / "out", job)

    assert found.start == "model_0000003.pth"
    assert found.num_before == 2
    assert found.on_the_way.endswith(" in model_final.pth, iterations 4 to 6")
    assert found.verdict.startswith("reproducible: ")
    assert [text.partition(":")[0] for text in sorted(found.differences)] == [
        "model_0000005.pth is damaged, so another file is used",
        "model_0000007.pth is damaged, so another file is used",
    ]
    assert [line.partition(": model")[0] for line in ranged.splitlines()[1:]] == [
        "not as in the run"
    ] * 2


def test_the_verdict_says_no_more_than_the_executions_show():
    first, same, other, third = (
        [("model before the step", "0"), ("batch", "1"), ("module", output)] for output in "2234"
    )
    moved = [("model before the step", "9"), *third[1:]]
    failed = RuntimeError("the replay has failed")
    for again, new, way, equals_run, start in [
        (
            same,
            same,
            None,
            True,
            f"reproducible: {SAME}; in a new process, every bit is equal",
        ),
        (same, same, None, None, "reproducible, but not compared with the run, which has stored"),
        (same, same, None, False, "different from the run, which has stored other values"),
        (other, same, None, True, "with a state that no checkpoint holds (a counter"),
        (same, other, None, True, "other in each process (the order of a set"),
        (same, moved, same, True, "other in each process (the order of a set"),
        (same, moved, third, True, "differs on the way (before the step: chance"),
        (same, failed, failed, True, "differs on the way (before the step: chance"),
        (same, failed, same, True, "other in each process (the order of a set"),
        (other, third, None, True, "transient (hardware, "),
    ]:
        if isinstance(way, list):
            way = SimpleNamespace(parts=way)
        verdict, is_equal = judge(
            SimpleNamespace(parts=first),
            SimpleNamespace(parts=again),
            new,
            equals_run,
            from_start=way,
        )

        assert verdict.startswith(start)
        assert is_equal == (again == new == same and equals_run is not False)
    assert not is_on_the_way(SimpleNamespace(parts=first), third)
    assert is_on_the_way(SimpleNamespace(parts=first), moved)


SCRIPT = """
import sys
from tests.engine.job import TinyClassifier
from trainkit.modeling import MODEL_REGISTRY
from trainkit.projects.replay.tests.job import train

@MODEL_REGISTRY.register()
class InOrderOfASet(TinyClassifier):
    def forward(self, batch):
        return {"loss_cls": super().forward(batch)["loss_cls"] * float(next(iter({*map(str, range(1, 1000))})))}

train("run", *sys.argv[1:], options=("DATASETS.TEST", ()))
"""


def test_a_new_process_shows_that_the_machine_is_innocent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the script imports from tests
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["train.py", "MODEL.NAME", "InOrderOfASet"]
    subprocess.run([sys.executable, *words], check=True, env={**os.environ, "PYTHONHASHSEED": "1"})
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    command = [sys.executable, "-m", "trainkit.projects.replay", "run", "--iter", "5", "--", *words]
    printed = subprocess.run(command, capture_output=True, text=True)
    assert "\nverdict: other in each process (the order of a set" in printed.stdout, printed
    assert "variable PYTHONHASHSEED: 1 in the run, not set now" in printed.stdout


def test_values_that_no_sample_changes_are_no_proof(tmp_path):
    """With this period only the learning rate is stored."""
    Job(tmp_path, "LOG.GATHER_PERIOD", 60)()
    found = replay(tmp_path, 6, Job(tmp_path, "INPUT.TRAIN_TRANSFORM", ""))
    by_bytes = replay(tmp_path, 6, Job(tmp_path), prove=True)
    assert found.on_the_way.startswith("2 of 2 logged values equal those in model_final.pth")
    assert found.on_the_way.endswith("; none of them depends on the data")
    assert found.verdict.startswith("reproducible, but not compared with the run, ")
    assert by_bytes.proof == proof("model_final.pth")


def test_what_differs_from_the_run_is_said(run, tmp_path):
    def change(state):
        origin = state["trainer"]["origin"]
        assert {"tests/engine/job.py", "projects/replay/tests/job.py", "trainkit"} <= origin[
            "files"
        ].keys()
        assert not any("site-packages" in path or "/lib/python" in path for path in origin["files"])
        origin["files"] |= {"tests/engine/job.py": "another", "gone.py": "1"}
        origin["facts"] |= {"version of torch": "2.12.0", "device": "NVIDIA H100"}
        state["trainer"]["num_threads"] = 1
        origin["facts"] |= {
            "instructions of the CPU": "SSE",
            "variable OMP_SCHEDULE": "x",
        }

    threads = []
    job = Job(
        tmp_path,
        "SOLVER.BASE_LR",
        0.2,
        make_hooks=lambda: threads.append(torch.get_num_threads()) or [],
    )
    found = replay(changed_copy(run, tmp_path, change), 6, job, verdict=False)

    assert threads == [1]  # set for the replay, so it is no difference
    assert found.differences == [
        "setting SOLVER.BASE_LR: 0.1 in the run, which is used; 0.2 in the command now",
        "device: NVIDIA H100 in the run, cpu now",
        f"version of torch: 2.12.0 in the run, {torch.__version__} now",
        f"instructions of the CPU: SSE in the run, {torch.backends.cpu.get_cpu_capability()} now",
        "variable OMP_SCHEDULE: x in the run, not set now",
        "code: tests/engine/job.py is another one now",
        "code: gone.py is not imported now",
    ]
    assert str(found).splitlines()[2] == f"not as in the run: {found.differences[0]}"


def test_modules_that_only_writers_import_are_no_difference(tmp_path, monkeypatch):
    """They are in the repository, which is the current folder, and a replay has no writers."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "train.py").write_text(
        "from trainkit.projects.replay.tests.job import train\n"
        f"train({str(tmp_path / 'run')!r}, options=('LOG.WRITERS', ['tensorboard', 'csv']))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    train = [sys.executable, str(tmp_path / "train.py")]
    subprocess.run(train, check=True, env=environ, capture_output=True)
    origin = read_file(tmp_path / "run/model_final.pth")["trainer"]["origin"]
    words = ["tools/replay.py", str(tmp_path / "run"), "--iter", "6", "--once", "--", *train]
    found = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True)

    writers = {"projects/loggers/tensorboard_writer.py", "projects/loggers/csv_writer.py"}
    assert writers <= origin["files"].keys()
    assert "settings, code, versions and machine are as in the run" in found.stdout, found
    assert "not as in the run" not in found.stdout


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_run_on_a_gpu_that_is_not_here_is_replayed_on_the_device_of_the_command(
    run, tmp_path, device
):
    def change(state):
        origin = state["trainer"]["origin"]
        assert "DEVICE: cpu\n" in origin["config"]
        origin["config"] = origin["config"].replace("DEVICE: cpu\n", "DEVICE: cuda:99\n")

    copy = changed_copy(run, tmp_path, change)
    found = replay(copy, 6, Job(tmp_path, "MODEL.DEVICE", device), verdict=False)
    assert next(iter(found.gradients.values())).device.type == "cpu"
    assert found.differences == []  # the tests of trainkit run on a CPU here


def test_a_run_on_auto_is_replayed_by_its_command_without_a_difference(tmp_path):
    job = Job(tmp_path, "MODEL.DEVICE", "auto")
    job()
    assert replay(tmp_path, 6, job, verdict=False).differences == []


def test_what_cannot_be_replayed_is_refused_with_the_reason(run, tmp_path):
    for kind, arguments, message in [
        (
            ConfigError,
            (tmp_path / "nowhere", 3, run),
            "got '.*/nowhere' .*; accepted: the folder of a run and --iter",
        ),
        (
            CheckpointError,
            (tmp_path, 3, run),
            "no checkpoint of a DefaultTrainer that says how its run was started",
        ),
        (
            ConfigError,
            (run.folder, -1, run),
            "--iter is -1; accepted: 0 to 9, the iterations of the run",
        ),
        (ConfigError, (run.folder, 3, lambda: None), "has ended before it trained"),
        (
            CheckpointError,
            (file := run.folder / "model_final.pth", None, run),
            "is no capsule of a step; .* its folder",
        ),
        (ConfigError, (file, 3, run), "iter=3, .* or a capsule without --iter and --prove"),
    ]:
        with pytest.raises(kind, match=message):
            replay(*arguments)
    with pytest.raises(
        CheckpointError, match="no checkpoint after iteration 10; leave out --prove"
    ):
        replay(run.folder, 10, run, prove=True)
    changed_copy(
        run,
        tmp_path,
        lambda state: state["trainer"]["origin"]["facts"].update({"number of processes": 4}),
    )
    with pytest.raises(
        CheckpointError, match="torchrun --nproc-per-node 4 -m trainkit.projects.replay"
    ):
        replay(tmp_path, 6, run)


@MODEL_REGISTRY.register()
class Pair(nn.Module):
    """A generator and a critic, which are called one by one."""

    def __init__(self, cfg):
        super().__init__()
        self.generator, self.critic = (
            nn.Linear(4, 4),
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        )


class Adversaries(DefaultTrainer):
    """Two optimizers; the iterator ``mine``, if any, is the trainer's own."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.of_critic = torch.optim.SGD(self.model.critic.parameters(), lr=0.1)
        self.mine = iter(self.data_loader) if cfg.MODEL.OWN_ITERATOR else None

    def run_step(self):
        batch = next(self.mine) if self.mine else self.fetch()
        fake = self.model.generator(batch["x"])
        loss = self.model.critic(batch["x"]).mean() - self.model.critic(fake.detach()).mean()
        self.of_critic.zero_grad()
        loss.backward()
        self.of_critic.step()
        loss_of_generator = self.model.critic(fake).mean()
        self.optimizer.zero_grad()
        loss_of_generator.backward()
        self.optimizer.step()
        self.storage.put_scalars(loss_critic=loss.item(), loss_generator=loss_of_generator.item())
        if not loss.isfinite():
            raise FloatingPointError("the loss of the critic is not finite")


def game(folder, *hooks, own_iterator=False):
    own = ("MODEL.NAME", "Pair", "MODEL.OWN_ITERATOR", own_iterator, "DATASETS.TEST", ())
    return Job(folder, *own, make_hooks=lambda: hooks, base=Adversaries)


def test_a_step_with_two_optimizers_shows_its_batch_modules_and_gradients_and_the_bad_module(
    tmp_path,
):
    play = game(tmp_path, plant_nan("critic.1.bias", 7))
    with pytest.raises(FloatingPointError):
        play()

    good, bad = replay(tmp_path, 6, play), replay(tmp_path, 7, play, verdict=False, bisect=True)

    assert good.batch["x"].shape == (8, 4)
    assert len(good.samples) == 8
    assert [name for name, _ in good.inspection.outputs][:3] == [
        "generator",
        "critic.0",
        "critic.1",
    ]
    assert good.losses.keys() == {"loss_critic", "loss_generator", "lr"}
    assert len(good.gradients) == 6  # weights and biases of three layers
    assert good.on_the_way.startswith("6 of 6 logged values equal those in capsule.rank0.pt")
    assert good.verdict.startswith("reproducible: repeated in this process, every bit is equal")
    assert bad.error.startswith("FloatingPointError: the loss of the critic")
    assert bad.first_bad_module == "critic.1"
    assert "they cannot be looked at one by one" in bad.samples_at_fault
    with pytest.raises(CheckpointError, match="holds no step"):
        replay(tmp_path / "capsule.rank0.pt", start=play)


def test_an_iterator_of_the_trainer_is_no_fault_of_the_machine(tmp_path):
    play = game(tmp_path, own_iterator=True)
    play()
    found = replay(tmp_path, 3, play)
    assert found.on_the_way.endswith(
        "logged values equal those in model_0000004.pth, iterations 0 to 3"
    )
    assert found.verdict.startswith(
        "transient, or with a state that no checkpoint holds: in this process it differs"
    )
    assert "differs in the batch" in found.verdict
