"""Save in the background: the state is that of the call, whatever happens meanwhile."""

import copy
import json
import logging
import threading
from types import SimpleNamespace

import pytest
import torch
from ckpt_faults import Faults, held
from ckpt_parts import Run, listed, parts, restored

from tr_ckpt import Checkpointer, CheckpointError, RNGState, discovery, files, retention


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    if isinstance(state, list | tuple):
        return [tensor for value in state for tensor in tensors_of(value)]
    return []


def trained():
    run = Run()
    run.train(3)
    return run


def test_a_save_returns_before_anything_is_written_and_wait_after_all_is(tmp_path):
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    with held() as writing:
        folder = checkpointer.save(1, parts(10))
        writing.wait_until_writing()
        assert folder == tmp_path / "checkpoint-1"
        assert not folder.exists()
        checkpointer.check()
        writing.let_go()
        checkpointer.wait()
        assert (folder / "manifest.json").exists()
    assert listed(tmp_path) == ["checkpoint-1"]
    assert restored(tmp_path) == (1, 10)


def test_every_tensor_may_change_during_the_write(tmp_path):
    run = trained()
    given = {**run.parts(), "rng": RNGState()}
    expected = {name: copy.deepcopy(part.state_dict()) for name, part in given.items()}
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    with held() as writing:
        checkpointer.save(3, given)
        writing.wait_until_writing()
        run.train(2)
        for tensor in tensors_of([run.model.state_dict(), run.optimizer.state_dict()]):
            tensor.fill_(7)
        assert Checkpointer(tmp_path).steps() == []
    checkpointer.wait()
    again = Run()
    assert Checkpointer(tmp_path).restore({**again.parts(), "rng": RNGState()}) == 3
    found = {name: part.state_dict() for name, part in {**again.parts(), "rng": RNGState()}.items()}
    for name, state in expected.items():
        pairs = zip(tensors_of(state), tensors_of(found[name]), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name


def test_a_run_that_trains_on_during_the_write_goes_on_from_it_bit_for_bit(tmp_path):
    alone = Run()
    alone.train(6)
    run = Run()
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    run.train(2)
    with held() as writing:
        checkpointer.save(2, run.parts())
        writing.wait_until_writing()
        run.train(1)
    checkpointer.close()
    resumed = Run()
    Checkpointer(tmp_path).restore(resumed.parts())
    resumed.train(4)
    assert torch.equal(resumed.weights(), alone.weights())


def test_both_ways_of_saving_write_the_same_bytes(tmp_path):
    run = trained()
    torch.manual_seed(1)

    def write_extra(folder):
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "words.txt").write_text("a b")

    folders = []
    for asynchronous in (False, True):
        checkpointer = Checkpointer(tmp_path / str(asynchronous), asynchronous=asynchronous)
        folders.append(checkpointer.save(3, run.parts(), write_extra=write_extra))
        checkpointer.close()
    written = [{str(p.relative_to(f)): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in folders]
    manifests = [json.loads(files_written.pop("manifest.json")) for files_written in written]
    assert written[0] == written[1]
    assert "tokenizer/words.txt" in written[0]
    for described in manifests:
        del described["saved_at"], described["manifest_sha256"]
    assert manifests[0] == manifests[1]


def test_later_saves_take_no_new_memory(tmp_path):
    run = trained()
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    state = tensors_of([part.state_dict() for part in run.parts().values()])
    state_bytes = sum(tensor.nbytes for tensor in state)
    checkpointer.save(3, run.parts())
    assert checkpointer._buffers.allocations == len(state)
    for step in (4, 5):
        run.train(1)
        checkpointer.save(step, run.parts())
    checkpointer.close()
    assert checkpointer._buffers.allocations == len(state)
    assert checkpointer._buffers.copied_bytes == 3 * state_bytes
    assert checkpointer._buffers.held_bytes == state_bytes
    assert checkpointer.steps() == [3, 4, 5]


def test_a_save_that_is_not_asynchronous_copies_nothing(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, trained().parts())
    assert checkpointer._buffers.allocations == 0


def test_a_save_waits_for_the_one_before_and_says_how_long(tmp_path, caplog):
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    with held() as writing:
        checkpointer.save(1, parts(10))
        writing.wait_until_writing()
        timer = threading.Timer(0.3, writing.let_go)
        timer.start()
        checkpointer.save(2, parts(20))
        assert (tmp_path / "checkpoint-1").is_dir()
    checkpointer.close()
    [line] = [record for record in caplog.records if "training waited" in record.message]
    assert line.levelno == logging.WARNING
    assert line.message.startswith("training waited 0.")
    assert line.message.endswith(" s for the checkpoint before to be written; save less often, or to a faster disk")
    assert checkpointer.steps() == [1, 2]
    # Not again as a warning: a run whose disk is slow would say nothing else.
    with caplog.at_level(logging.INFO), held() as writing:
        checkpointer.save(3, parts(30))
        timer = threading.Timer(0.3, writing.let_go)
        timer.start()
        checkpointer.save(4, parts(40))
        checkpointer.close()
    assert [record.levelname for record in caplog.records if "training waited" in record.message] == ["WARNING", "INFO"]


@pytest.mark.parametrize("ask", ["steps", "path", "restore"])
def test_who_asks_for_a_checkpoint_waits_for_it(ask, tmp_path):
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    with held() as writing:
        checkpointer.save(1, parts(10))
        writing.wait_until_writing()
        threading.Timer(0.05, writing.let_go).start()
        if ask == "steps":
            assert checkpointer.steps() == [1]
        elif ask == "path":
            assert (checkpointer.path(1) / "manifest.json").exists()
        else:
            assert checkpointer.restore(parts()) == 1


def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path):
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    with pytest.raises(CheckpointError, match="bad.x is a object"):
        checkpointer.save(1, {**parts(1), "bad": SimpleNamespace(state_dict=lambda: {"x": object()})})
    assert listed(tmp_path) == []
    checkpointer.save(1, parts(1))
    checkpointer.close()
    assert checkpointer.steps() == [1]


def test_the_callers_files_are_added_before_save_returns_and_verified_like_others(tmp_path):
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    threads = []

    def write_extra(folder):
        threads.append(threading.current_thread())
        (folder / "config.json").write_text("{}")

    with held() as writing:
        folder = checkpointer.save(1, parts(1), write_extra=write_extra)
        assert threads == [threading.main_thread()]
        writing.let_go()
        checkpointer.close()
    described = json.loads((folder / "manifest.json").read_text())
    assert described["files"]["config.json"]["bytes"] == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_to_follow_sees_a_complete_checkpoint_before_any_is_removed(asynchronous, tmp_path):
    seen = []

    def on_commit(folder):
        complete = discovery.check_quickly(discovery.Found(None, folder.name, folder)).step
        alone = threading.current_thread() is threading.main_thread()
        seen.append((folder, complete, alone, listed(tmp_path)))

    checkpointer = Checkpointer(tmp_path, keep_last=1, asynchronous=asynchronous)
    checkpointer.save(1, parts(1))
    folder = checkpointer.save(2, parts(2), on_commit=on_commit)
    checkpointer.close()
    assert seen == [(folder, 2, not asynchronous, ["checkpoint-1", "checkpoint-2"])]
    assert checkpointer.steps() == [2]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_follows_and_fails_is_logged_and_the_checkpoint_stays(asynchronous, tmp_path, caplog):
    def on_commit(folder):
        raise RuntimeError("no network")

    checkpointer = Checkpointer(tmp_path, keep_last=1, asynchronous=asynchronous)
    checkpointer.save(1, parts(1))
    checkpointer.save(2, parts(2), on_commit=on_commit)
    checkpointer.close()
    assert "checkpoint-2 is saved, but on_commit failed" in caplog.text
    assert "RuntimeError: no network" in caplog.text
    assert checkpointer.steps() == [2]


def test_old_ones_go_in_the_background_after_the_new_one_was_read_back(tmp_path, monkeypatch):
    events = []
    for module, name in ((discovery, "damages"), (retention, "remove")):
        original = getattr(module, name)

        def noting(*arguments, name=name, original=original):
            events.append((name, threading.current_thread() is threading.main_thread()))
            return original(*arguments)

        monkeypatch.setattr(module, name, noting)
    checkpointer = Checkpointer(tmp_path, keep_last=1, keep_every=4, asynchronous=True)
    for step in (2, 4, 6, 7):
        checkpointer.save(step, parts(step), protected=(2,))
    checkpointer.close()
    assert events == [("damages", False), ("remove", False)]
    assert checkpointer.steps() == [2, 4, 7]


def test_arguments_ask_for_it(tmp_path):
    alone = SimpleNamespace(rank=0, world_size=1, gather_objects=None)
    plain = Checkpointer.from_arguments(SimpleNamespace(output_dir=tmp_path, save_total_limit=None), alone)
    assert (plain.asynchronous, plain.keep_every) == (False, None)
    args = SimpleNamespace(output_dir=tmp_path, save_total_limit=1, save_async=True, save_keep_every=10)
    checkpointer = Checkpointer.from_arguments(args, alone)
    for step in (10, 12, 14):
        checkpointer.save(step, parts(step))
    checkpointer.close()
    assert checkpointer._buffers.allocations
    assert checkpointer.steps() == [10, 14]


@pytest.fixture
def failing(tmp_path):
    """A checkpointer with one checkpoint, and a write in the background that has failed."""
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    checkpointer.save(1, parts(10))
    checkpointer.wait()
    with held() as writing:
        checkpointer.save(2, parts(20))
        writing.wait_until_writing()
        with Faults(1, "full"):
            writing.let_go()
            checkpointer._background.join()
    return checkpointer


@pytest.mark.parametrize("how", ["check", "wait", "close", "save"])
def test_a_failed_write_is_raised_once_by_whatever_is_called_first(how, failing, tmp_path):
    first = {"save": lambda: failing.save(3, parts(30))}.get(how, getattr(failing, how))
    with pytest.raises(
        OSError, match=r"checkpoint-2 was not saved in .*: No space left on device.* — free space there"
    ):
        first()
    failing.check()
    failing.wait()
    assert restored(tmp_path) == (1, 10)
    failing.save(4, parts(40))
    failing.close()
    assert failing.steps() == [1, 4]


def test_the_log_has_the_failure_before_anybody_asks(failing, caplog, tmp_path):
    [line] = [record for record in caplog.get_records("setup") if record.levelno == logging.ERROR]
    assert line.message.startswith("in the background: OSError: [Errno 28] checkpoint-2 was not saved in ")
    # Who only looks does not raise it.
    assert failing.steps() == [1]
    assert failing.path(2) == tmp_path / "checkpoint-2"
    assert failing.restore(parts()) == 1
    assert listed(tmp_path) == ["checkpoint-1"]
    with pytest.raises(OSError, match="checkpoint-2 was not saved"):
        failing.close()


def test_a_folder_that_vanishes_during_the_write_is_named(tmp_path):
    import shutil

    directory = tmp_path / "run"
    checkpointer = Checkpointer(directory, asynchronous=True)
    with held() as writing:
        checkpointer.save(1, parts(1))
        writing.wait_until_writing()
        shutil.rmtree(directory)
    with pytest.raises(
        FileNotFoundError, match=r"checkpoint-1 was not saved in .*run: No such file.*it was removed while"
    ):
        checkpointer.wait()
    checkpointer.save(2, parts(2))
    checkpointer.close()
    assert restored(directory) == (2, 2)


def test_where_no_thread_can_be_started_the_save_is_made_at_once(tmp_path, monkeypatch, caplog):
    def start(self):
        raise RuntimeError("can't start new thread")

    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        checkpointer.save(1, parts(1))
    assert (tmp_path / "checkpoint-1" / "manifest.json").exists()
    assert "writing checkpoint-1 continues in the foreground: can't start new thread" in caplog.text
    checkpointer.close()


def test_the_process_of_the_thread_holds_no_more_than_a_block_back(tmp_path, monkeypatch):
    """What is written and hashed in one go lets the interpreter go: blocks, not a call for every few bytes."""
    sizes = []
    original = files.write
    monkeypatch.setattr(files, "write", lambda d, data: (sizes.append(len(data)), original(d, data)))
    big = {"t": torch.zeros(3 * files.BLOCK_BYTES // 4 + 5)}
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    checkpointer.save(1, {"model": SimpleNamespace(state_dict=lambda: big)})
    checkpointer.close()
    assert sizes.count(files.BLOCK_BYTES) == 3
    assert max(sizes) == files.BLOCK_BYTES


def test_what_follows_a_checkpoint_may_ask_the_checkpointer(tmp_path, caplog):
    checkpointer, seen = Checkpointer(tmp_path, asynchronous=True), []

    def ask(folder):
        seen.append((checkpointer.path(1) == folder, checkpointer.steps()))

    checkpointer.save(1, parts(10), on_commit=ask)
    checkpointer.wait()
    assert seen == [(True, [1])]
    assert not caplog.records
