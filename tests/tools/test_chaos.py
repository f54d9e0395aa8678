"""The proof by killing: a short one, and its control."""

import argparse

import pytest

from tools import chaos, chaos_job
from trainkit.utils.logger import close_logger


def arguments(output_dir, *options):
    return chaos.parse_args([*options, "--output-dir", str(output_dir)])


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--kills 3 --seed 5", "--kills 2 --seed 1 --logical-ranks 4"])
def test_a_killed_run_ends_as_one_that_was_left_alone(tmp_path, capsys, options):
    code = chaos.main(arguments(tmp_path / "runs", *options.split()))
    printed = capsys.readouterr().out
    assert (printed.splitlines()[-1], code) == ("identical", 0), printed
    if "logical" in options:  # with other numbers of processes
        assert [line for line in printed.splitlines() if "model_00" in line and "rank" in line]
    else:
        assert "3 kills (0 more were planned and missed): " in printed
        assert "; 2 follow a resume from a checkpoint, 0 were of one rank only" in printed


@pytest.mark.slow
def test_each_part_of_a_checkpoint_is_missed_if_it_is_left_out(tmp_path):
    job = chaos.Job(arguments(tmp_path, "--config-seed", "-1"))  # SEED is drawn at random
    # by a new interpreter, as the tool starts it
    assert job.start(tmp_path / "reference").code == 0
    for number, kill in enumerate(chaos.CONTROL_KILLS):
        assert job.start(tmp_path / f"killed_{number}", kill).is_hit

    def resume(copy, part):
        # without workers, since that is quicker, and the same
        args = argparse.Namespace(
            output_dir=copy, seed=0, config_seed=-1, workers=0, resume=True, logical_ranks=0
        )
        chaos_job.train(args, {"without": part})
        close_logger()

    control = chaos.leave_out_and_compare(tmp_path, resume)
    # "": nothing is left out
    assert {part for part, found in control.items() if not found} == {
        "",
        *chaos.NOT_MISSED,
    }
    assert {
        "model",
        "trainer/rng",
        "trainer/data",
        "trainer/storage",
        "trainer/boundary",
        "trainer/end",
    } <= control.keys()
    assert {"trainer/hooks/EMAHook", "trainer/_trainer/optimizer"} <= control.keys()
