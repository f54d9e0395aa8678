import logging
import math
import re

import numpy as np
import pytest
import torch

from trainkit.config import get_cfg
from trainkit.evaluation import flatten_results_dict, print_csv_format, verify_results

RESULTS = {"classification": {"top1": 98.5, "top5": 100.0}, "loss": {"total_loss": 0.0625}}


def logged(caplog, function, *args):
    with caplog.at_level(logging.INFO, logger="trainkit.evaluation"):
        function(*args)
    return "\n".join(record.getMessage() for record in caplog.records)


def test_flatten_joins_the_keys_of_any_depth():
    assert flatten_results_dict({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {
        "a/b": 1,
        "a/c/d": 2,
        "e": 3,
    }


def test_the_table_has_a_row_for_each_metric(caplog):
    assert logged(caplog, print_csv_format, {**RESULTS, "val": {"seen": {"n/m": 3}}}) == (
        "Evaluation results:\n"
        "| task           | metric     |    value |\n"
        "|:---------------|:-----------|---------:|\n"
        "| classification | top1       |  98.5000 |\n"
        "| classification | top5       | 100.0000 |\n"
        "| loss           | total_loss |   0.0625 |\n"
        "| val/seen       | n/m        |        3 |"
    )


def test_one_element_of_numpy_or_torch_is_a_number_and_several_are_refused_by_their_name(caplog):
    results = {"task": {"a": np.array([5.0]), "b": torch.tensor([[0.25]]), "c": np.float32(0.5)}}
    table = logged(caplog, print_csv_format, {"task": {**results["task"], "n": torch.tensor([3])}})
    assert [line.split("|")[3].strip() for line in table.splitlines()[3:]] == [
        "5.0000",
        "0.2500",
        "0.5000",
        "3",
    ]
    entries = [("task", name, value, 0.0) for name, value in (("a", 5.0), ("b", 0.25), ("c", 0.5))]
    assert verify_results(expecting(*entries), results)
    with pytest.raises(ValueError, match=r"result 'task/a' must be a number, got .*\[2\]"):
        verify_results(expecting(("task", "a", 5.0, 0.0)), {"task": {"a": np.ones(2)}})


def expecting(*entries):
    cfg = get_cfg()
    cfg.TEST.EXPECTED_RESULTS = [list(entry) for entry in entries]
    return cfg


def test_results_within_their_tolerance_are_accepted_and_agreement_is_logged(caplog):
    caplog.set_level("INFO")
    assert verify_results(expecting(), {})
    assert not caplog.messages
    assert verify_results(expecting(("test/classification", "top1", 98.5, 0.1)), {"test": RESULTS})
    assert verify_results(
        expecting(("classification", "top1", 99.0, 0.5), ("loss", "total_loss", 0.0625, 0)), RESULTS
    )
    first, second = caplog.messages
    assert first == second
    assert "TEST.EXPECTED_RESULTS" in first


@pytest.mark.parametrize(
    ("entry", "results", "said"),
    [
        (
            ("classification", "top1", 99.1, 0.5),
            RESULTS,
            r"classification/top1: expected 99.1 \+- 0.5, got 98.5",
        ),
        (("classification", "top2", 99.1, 0.5), RESULTS, "classification/top2: .* got nan"),
        (("loss", "total_loss", 1.0, math.inf), {"loss": {"total_loss": math.inf}}, "got inf"),
    ],
)
def test_a_mismatch_is_logged_and_ends_the_process_with_code_1(caplog, entry, results, said):
    with pytest.raises(SystemExit) as exit_info:
        verify_results(expecting(entry), results)
    assert exit_info.value.code == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert re.search(said, record.getMessage())
