"""An error of reading is not damage: it is tried again, then ends the restore in words, and nothing is removed."""

import contextlib
import errno
import logging

import ckpt_foreign
import pytest
from ckpt_faults import ERRNOS, BadReads, error, in_threads
from ckpt_parts import number_of, parts, restored, save_steps

from tr_ckpt import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpointError,
    SaveError,
    UnreadableError,
    discovery,
    folder_lock,
    manifest,
    reads,
)
from tr_ckpt.errors import Damage


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(reads, "DELAYS_S", (0.001, 0.002))


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 10, 20 and 30."""
    return save_steps(tmp_path)


def folders(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != folder_lock.NAME)


def reads_of_a_restore(directory):
    with BadReads(after=10**9) as counted:
        Checkpointer(directory).restore(parts())
    return len(counted.log)


def test_a_momentary_error_at_any_read_of_a_restore_changes_nothing(saved, caplog):
    count = reads_of_a_restore(saved.directory)
    assert count > 40
    for after in range(count):
        into = parts()
        with BadReads(times=1, after=after) as bad:
            assert Checkpointer(saved.directory).restore(into) == 30
        assert bad.failed == 1
        assert number_of(into) == 30
    said = {record.getMessage().partition(" (")[2] for record in caplog.records}
    assert said == {f"{error(errno.EIO).strerror}); trying again for a while"}


@pytest.mark.parametrize("number", ERRNOS)
def test_a_lasting_error_at_any_read_of_a_restore_ends_it_in_words_and_takes_no_other(number, saved):
    before = folders(saved.directory)
    name = errno.errorcode[number]
    for after in range(reads_of_a_restore(saved.directory)):
        into = parts()
        with BadReads(number, after=after), pytest.raises(UnreadableError) as caught:
            Checkpointer(saved.directory).restore(into)
        assert f"cannot be read: {error(number).strerror} ({name}), 3 times in" in str(caught.value)
        assert "nothing was removed" in str(caught.value)
        assert not isinstance(caught.value, DamagedCheckpointError)
        assert number_of(into) == 0
    assert folders(saved.directory) == before


@pytest.mark.parametrize("number", ERRNOS)
@pytest.mark.parametrize("where", ["checkpoint-30", "checkpoint-20", "manifest.json", "model.safetensors"])
def test_a_named_source_that_cannot_be_read_is_not_called_damaged(number, where, saved):
    with BadReads(number, where=where), pytest.raises(UnreadableError, match=where):
        Checkpointer(saved.directory / "elsewhere").restore(parts(), saved.directory)


def test_all_errors_but_those_of_form_are_errors_of_reading(saved):
    for number in (
        *ERRNOS, errno.EPERM, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.EBUSY, errno.EINVAL, errno.EREMOTEIO
    ):  # fmt: skip
        with BadReads(number, where="checkpoint-30/model.json"), pytest.raises(UnreadableError):
            Checkpointer(saved.directory).restore(parts())
    for number in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
        with BadReads(number, where="checkpoint-30/model.json"):
            assert Checkpointer(saved.directory).restore(parts()) == 20


def test_what_is_tried_again_is_tried_for_a_quarter_of_a_minute_at_least(monkeypatch):
    monkeypatch.undo()
    assert 15 <= sum(reads.DELAYS_S) <= 30
    assert reads.DELAYS_S[0] <= 0.1


def test_a_read_that_hangs_before_it_fails_is_not_tried_for_ever(saved, monkeypatch):
    monkeypatch.setattr(reads, "LIMIT_S", -1)
    with BadReads(where="model.json") as bad, pytest.raises(UnreadableError, match="2 times"):
        Checkpointer(saved.directory).restore(parts())
    assert bad.failed == 2


def test_a_digest_that_is_another_is_read_once_more_before_it_counts_as_damage(saved, monkeypatch, caplog):
    original, wrong = reads.digest, []

    def digest(path):
        if path.name == "model.safetensors" and not wrong:
            wrong.append(path)
            return 1, "0" * 64
        return original(path)

    monkeypatch.setattr(reads, "digest", digest)
    assert saved.restore(parts()) == 30
    assert "model.safetensors differ: check the disk" in caplog.text


def test_a_manifest_is_read_once_more_before_it_counts_as_damaged(saved, monkeypatch):
    original, wrong = reads.content, []

    def content(path, *most):
        found = original(path, *most)
        if "checkpoint-30" in str(path) and not wrong:
            wrong.append(path)
            return found.replace(b"30", b"31", 1)
        return found

    monkeypatch.setattr(reads, "content", content)
    assert manifest.read(saved.path(30)).step == 30
    assert wrong
    wrong.clear()
    assert saved.restore(parts()) == 30


def test_the_librarys_own_name_for_an_error_of_reading_is_seen_through(saved, monkeypatch):
    def open_tensors(path):
        raise reads.SafetensorError("I/O error: Input/output error")

    monkeypatch.setattr(reads, "open_tensors", open_tensors)
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a valid safetensors file") as caught:
        saved.restore({"model": parts()["model"]})  # it can be read, so it is what the library does not take
    assert not isinstance(caught.value, UnreadableError | DamagedCheckpointError)
    path = saved.path(30) / "model.safetensors"
    with BadReads(operations=("read_block",)), pytest.raises(UnreadableError), reads.tensors(path):
        pass


@pytest.mark.parametrize("number", ERRNOS)
def test_steps_are_not_listed_without_one_that_cannot_be_read(number, saved):
    with BadReads(number, where="checkpoint-20/model.json"), pytest.raises(UnreadableError):
        saved.steps()
    with BadReads(number, where="checkpoint-20/model.json", times=1):
        assert saved.steps() == [10, 20, 30]


PLACES = ("", "checkpoint-30", "checkpoint-30/manifest.json", "checkpoint-30/model.safetensors")


def checkpointer_of(rank, directory, gather_objects, **options):
    return Checkpointer(directory, rank=rank, world_size=2, gather_objects=gather_objects, **options)


def restored_by_two(directory):
    def restore(rank, gather_objects):
        into = parts()
        step = checkpointer_of(rank, directory, gather_objects).restore(into)
        return step, number_of(into)

    return in_threads(restore)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", PLACES)
def test_one_rank_of_two_that_cannot_read_for_a_moment_changes_nothing(rank, where, saved):
    for after in range(0, 12, 3):
        with BadReads(where=where, times=2, after=after, thread=f"rank-{rank}") as bad:
            assert restored_by_two(saved.directory) == [(30, 30), (30, 30)]
        assert bad.failed or after


@pytest.mark.parametrize("number", ERRNOS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", PLACES)
def test_one_rank_of_two_that_cannot_read_at_all_ends_both_with_one_error_that_names_it(number, rank, where, saved):
    with BadReads(number, where=where, thread=f"rank-{rank}"):
        first, second = restored_by_two(saved.directory)
    assert isinstance(first, UnreadableError)
    assert isinstance(second, UnreadableError)
    assert str(first) == str(second)
    assert f"was not restored: rank {rank}: " in str(first) or "nothing was restored: rank" in str(first)


def test_a_file_that_one_rank_alone_does_not_see_is_no_damage(saved):
    """As on a shared file system whose clients keep what they once saw."""
    with BadReads(errno.ENOENT, where="checkpoint-30/model.json", thread="rank-1"):
        first, second = restored_by_two(saved.directory)
    assert isinstance(first, UnreadableError)
    assert str(first) == str(second)
    assert "the ranks do not see the same files: model.json is missing on rank 1 alone" in str(first)
    with BadReads(errno.ENOENT, where="checkpoint-30/manifest.json", thread="rank-0", times=2, after=3):
        assert restored_by_two(saved.directory) == [(30, 30), (30, 30)]


def test_what_all_ranks_find_damaged_is_skipped_by_all(saved):
    (saved.path(30) / "model.json").unlink()
    assert restored_by_two(saved.directory) == [(20, 20), (20, 20)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("times", [1, 0])
def test_machines_without_a_shared_file_system_go_on_together_or_not_at_all(rank, times, tmp_path):
    def work(this, gather_objects):
        keeper = Checkpointer(
            tmp_path / f"machine-{this}", rank=this, local_rank=0, world_size=2, gather_objects=gather_objects
        )
        for step in (10, 20) if not (tmp_path / f"machine-{this}").exists() else ():
            keeper.save(step, parts(step))
        gather_objects(None)
        return keeper.restore(parts())

    assert in_threads(work) == [20, 20]
    for where in ("", "checkpoint-20", "model.safetensors"):
        with BadReads(where=where, times=times, thread=f"rank-{rank}"):
            ends = in_threads(work)
        if times:
            assert ends == [20, 20]
        else:
            assert [type(end) for end in ends] == [UnreadableError, UnreadableError]


@pytest.mark.parametrize("stride", [6, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_of_another_program_is_not_called_damaged_either(left, tmp_path, stride):
    with BadReads(after=10**9) as counted:
        assert Checkpointer(tmp_path / "ours").restore(ckpt_foreign.make(), left) == 3
    for after in range(0, len(counted.log), stride):
        with BadReads(times=1, after=after):
            assert Checkpointer(tmp_path / "ours").restore(ckpt_foreign.make(), left) == 3
        with BadReads(after=after), pytest.raises(UnreadableError):
            Checkpointer(tmp_path / "ours").restore(ckpt_foreign.make(), left)


def test_a_momentary_error_while_saving_gives_no_lower_sequence_and_loses_nothing(saved):
    with BadReads(after=10**9) as counted:
        saved.save(40, parts(40))
    for after in range(0, len(counted.log), 2):
        with BadReads(times=1, after=after):
            Checkpointer(saved.directory).save(50, parts(50))
        ages = {step: manifest.read_age(saved.path(step)) for step in (10, 20, 30, 40, 50)}
        assert max(ages, key=ages.get) == 50
    assert folders(saved.directory) == [f"checkpoint-{step}" for step in (10, 20, 30, 40, 50)]


def test_a_save_that_cannot_find_out_what_is_newer_is_refused_in_words(saved):
    with (
        BadReads(where="checkpoint-20/manifest.json", operations=("open_file",)),
        pytest.raises(SaveError, match=r"checkpoint-40 was not saved in .*checkpoint-20/manifest.json cannot be read"),
    ):
        Checkpointer(saved.directory).save(40, parts(40))
    assert folders(saved.directory) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]


def test_what_a_run_has_once_read_of_an_age_serves_it_later(saved):
    with BadReads(where="checkpoint-20/manifest.json", operations=("open_file",)) as bad:
        saved.save(40, parts(40))
    assert bad.failed == 0  # what was read when it was saved is not read again
    assert manifest.read_age(saved.path(40))[0] == 4


def left_while_replacing(directory, monkeypatch):
    """Leave checkpoint-30 saved again, and the one it replaced beside it, as a kill does."""
    with monkeypatch.context() as patched:
        patched.setattr("tr_ckpt.staging.discard", lambda folder: None)
        Checkpointer(directory).save(30, parts(31))
    [aside] = directory.glob(".tmp-replaced-checkpoint-30@*")
    return aside


@pytest.mark.parametrize("where", ["checkpoint-30/manifest.json", "checkpoint-30/model.json"])
def test_what_was_replaced_stays_while_the_one_in_its_place_cannot_be_read(where, saved, monkeypatch):
    aside = left_while_replacing(saved.directory, monkeypatch)
    with BadReads(where=where, after=1), contextlib.suppress(SaveError):  # what cannot be read may be the newest
        Checkpointer(saved.directory).save(40, parts(40))
    assert aside.exists()
    Checkpointer(saved.directory).save(40, parts(40))
    assert not aside.exists()


def test_what_was_replaced_stays_while_the_one_in_its_place_is_damaged(saved, monkeypatch, caplog):
    aside = left_while_replacing(saved.directory, monkeypatch)
    (saved.path(30) / "model.json").write_bytes(b"{}")
    Checkpointer(saved.directory).save(40, parts(40))
    assert aside.exists()
    assert "the replaced checkpoint-30 stays, as the one in its place is not sound: model.json" in caplog.text


SHORT = Damage("model.json", "content", "model.json is short")


def test_a_step_saved_again_keeps_the_one_before_until_the_new_one_has_been_read_back(saved, monkeypatch, caplog):
    monkeypatch.setattr(discovery, "verify", lambda folder, described: discovery.raise_if_damaged([SHORT]))
    saved.save(30, parts(31))
    [aside] = saved.directory.glob(".tmp-replaced-checkpoint-30@*")
    assert restored(saved.directory, aside) == (30, 30)


def test_an_error_of_reading_is_logged_once_while_it_is_tried_again(saved, caplog):
    with BadReads(where="checkpoint-30/model.json", times=2), caplog.at_level(logging.WARNING):
        saved.restore(parts())
    assert len(caplog.records) == 1


def test_ctrl_c_ends_the_waiting(saved, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(reads.time, "sleep", interrupted)
    with BadReads(), pytest.raises(KeyboardInterrupt):
        saved.restore(parts())
