"""Reads what wandb has written in offline mode."""

import json
import struct
import sys

HEADER, BLOCK = 7, 32768


def read_records(path):
    """The records of a ``.wandb`` file: protocol buffers in a log of LevelDB's format, after a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), HEADER, []
    assert data[:4] == b":W&B"
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        position += HEADER + length
        parts.append(data[position - length : position])
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(b"".join(parts))
            yield record
            parts = []


def read_runs(folder):
    """For each start, in the order of time, the file's id, config, rows of history and metrics by name."""
    # waits for wandb's process, which writes some time after the one that trains
    sys.modules["wandb"].teardown()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        run = {"file": path.stem, "config": {}, "rows": [], "axes": {}, "exit": None}
        for record in read_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run["config"] = {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            elif kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                run["rows"].append(
                    {key: row[key] for key in row.keys() - {"_timestamp", "_runtime"}}
                )
            elif kind == "metric":
                run["axes"][record.metric.name or record.metric.glob_name] = (
                    record.metric.step_metric
                )
            elif kind == "exit":
                run["exit"] = record.exit.exit_code
        yield run
