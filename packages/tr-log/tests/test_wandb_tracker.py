import json
import struct
import time

import pytest

from tr_log import WandbTracker

pytestmark = pytest.mark.filterwarnings("ignore")  # the warnings of another project and of what it uses
wandb = pytest.importorskip("wandb", exc_type=ImportError)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "CACHE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    if wandb.run is not None:
        wandb.run.finish()


def history(folder):
    """The logged rows of the one run in a folder, read from the file that it keeps for a later upload."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    records = []
    # Another process writes the file: its end may come after `finish` has returned.
    for _ in range(300):
        records = [Record.FromString(data) for data in framed(file.read_bytes())]
        if any(record.HasField("exit") for record in records):
            break
        time.sleep(0.1)
    rows = [record.history.item for record in records if record.HasField("history")]
    return [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in rows]


def framed(content):
    """The records of a LevelDB log: in blocks of 32 KiB, each piece behind its checksum, length and kind."""
    position, record = 7, b""  # after the file's own header
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        if position + 7 + length > len(content):  # not written to its end
            return
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_a_run_holds_what_was_logged_and_stays_open_for_evaluations(tmp_path, make_loop):
    loop = make_loop([WandbTracker.from_arguments(None)], tmp_path, max_steps=2)
    loop.train(eval_steps=2)
    assert wandb.run is not None
    loop.evaluate()
    wandb.run.finish()
    rows = history(tmp_path)
    assert [row["train/global_step"] for row in rows] == [1, 2, 2, 2, 2]
    assert rows[0]["train/loss"] == 1.0
    assert rows[-1]["eval/loss"] == pytest.approx(1 / 3)


def test_a_run_of_the_script_is_used_and_left_open(tmp_path, make_loop):
    run = wandb.init()
    with pytest.raises(KeyError):
        make_loop([WandbTracker()], tmp_path, learning_rate=0.5).train(stop_at=1, error=KeyError("boom"))
    assert wandb.run is run
    assert run.config["learning_rate"] == 0.5


def test_a_later_training_records_in_the_run_that_the_script_has_open_then(tmp_path, make_loop):
    loop = make_loop([WandbTracker()], tmp_path, max_steps=1)
    ids = []
    for _ in range(2):
        run = wandb.init()
        loop.train(eval_steps=0)
        assert run.summary["train/loss"] == 1.0
        ids.append(run.id)
        run.finish()
    assert len(set(ids)) == 2


def test_a_failed_training_and_the_next_one_end_its_own_run(tmp_path, make_loop):
    tracker = WandbTracker()
    with pytest.raises(KeyError):
        make_loop([tracker], tmp_path).train(stop_at=1, error=KeyError("boom"))
    assert wandb.run is None
    loop = make_loop([tracker], tmp_path, max_steps=1)
    loop.train()
    first = wandb.run
    loop.train()
    assert wandb.run is not first
