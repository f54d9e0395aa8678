"""Reads what wandb has written in offline mode."""

import json
import struct
import time

HEADER, BLOCK = 7, 32768


def read_records(path):
    """The records of a ``.wandb`` file: protocol buffers in a log of LevelDB's format, behind a header of its own.

    A record that the end of the process has left incomplete is left out.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), HEADER, []
    assert data[:4] == b":W&B"
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        if kind == 0:
            return
        parts.append(data[position + HEADER : position + HEADER + length])
        position += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(b"".join(parts))
            yield record
            parts = []


def read_runs(folder):
    """For each start, in the order of time, the file's id, config, rows of history and metrics by name."""
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        run = {"file": path.stem, "config": {}, "rows": [], "axes": {}, "exit": None}
        for record in read_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                run["rows"].append({_key(i): json.loads(i.value_json) for i in record.history.item})
            elif kind == "metric":
                run["axes"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
            elif kind == "exit":
                run["exit"] = record.exit.exit_code
        yield run


def wait_for(is_there, folder):
    """The runs, once ``is_there(runs)``: the process of wandb writes some time behind the one that trains."""
    deadline = time.monotonic() + 12  # less than the 15 s after which wandb writes by itself
    while not is_there(runs := [*read_runs(folder)]):
        assert time.monotonic() < deadline, runs
    return runs


def finished_runs(folder):
    return wait_for(lambda runs: all(run["exit"] is not None for run in runs), folder)


def _key(item):
    return item.key or "/".join(item.nested_key)
