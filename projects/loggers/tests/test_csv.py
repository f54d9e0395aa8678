import csv
import io
import math

from trainkit.utils.events import CSVWriter, EventStorage


def test_each_new_scalar_has_a_row_with_its_iteration_and_its_exact_value(tmp_path):
    writer = CSVWriter(tmp_path / "metrics.csv", window_size=3)
    with EventStorage() as storage:
        for storage.iter, loss in enumerate([9.0, 1.0, 8.0, 0.1]):
            storage.put_scalar("loss", loss)
        storage.put_scalar("rare", 1 / 3, cur_iter=1)
        storage.put_scalar("top1", 50.0)
        writer.write()
        writer.write()  # nothing is new
        storage.iter = 4
        storage.put_scalar('a, "b"', math.nan)
        storage.put_scalar("=1+1", 2.0)  # names stay as they are
        storage.put_scalar("high", math.inf)
        storage.put_scalar("low", -math.inf)
        writer.write()
        writer.close()

    text = (tmp_path / "metrics.csv").read_text()
    assert text.splitlines() == [
        "iteration,epoch,name,value",
        "1,,rare,0.3333333333333333",
        "3,,loss,1.0",
        "3,,top1,50.0",
        '4,,"a, ""b""",nan',
        "4,,=1+1,2.0",
        "4,,high,inf",
        "4,,low,-inf",
    ]
    assert [*csv.DictReader(io.StringIO(text))][3]["name"] == 'a, "b"'


def test_the_file_of_a_resumed_run_is_cut_at_its_checkpoint_and_has_one_header(tmp_path):
    def write(writer, iters):
        with EventStorage() as storage:
            for storage.iter in iters:
                storage.put_scalar("loss", math.sin(storage.iter), smoothing_hint=False)
                writer.write()
        writer.close()

    first, path = CSVWriter(tmp_path / "metrics.csv"), tmp_path / "metrics.csv"
    write(first, range(4))
    state = first.state_dict()
    write(first, range(4, 7))
    whole = path.read_text()
    second = CSVWriter(path)
    second.load_state_dict(state)
    write(second, range(4, 7))
    assert path.read_text() == whole
    assert whole.endswith((tmp_path / "metrics.csv.cut_1").read_text())
    path.write_text("iteration,epo")  # all the rest is lost
    third = CSVWriter(path)
    third.load_state_dict(state)
    write(third, range(4, 7))
    lines = whole.splitlines(keepends=True)
    assert path.read_text() == "".join([lines[0], *lines[5:]])
