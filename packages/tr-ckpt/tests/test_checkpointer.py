"""Save a training state and go on from it."""

import copy
import json
import logging
import weakref
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from ckpt_parts import Run, Values, listed, number_of, parts, restored
from safetensors.torch import load_file

from tr_ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, Restored, RNGState
from tr_ckpt.ranks import Failure


def test_the_model_file_holds_the_plain_names(tmp_path):
    run = Run()
    folder = Checkpointer(tmp_path).save(1, run.parts())
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == run.model.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in run.model.state_dict().items())


def test_a_checkpoint_holds_no_file_but_json_and_safetensors(tmp_path):
    folder = Checkpointer(tmp_path).save(1, Run().parts())
    assert folder == tmp_path / "checkpoint-1"
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json", "model.json", "model.safetensors", "optimizer.json", "rng-0.json", "rng-0.safetensors",
        "scheduler.json",
    }  # fmt: skip


class Copies:
    """A part whose state is a copy in host memory, as that of a model on XLA; `most_bytes` of all are held at once."""

    held_bytes = most_bytes = 0

    def state_dict(self):
        tensor = torch.ones(1000)
        Copies.held_bytes += tensor.nbytes
        Copies.most_bytes = max(Copies.most_bytes, Copies.held_bytes)
        weakref.finalize(tensor, self.free, tensor.nbytes)
        return {"copy": tensor}

    @staticmethod
    def free(size_bytes):
        Copies.held_bytes -= size_bytes


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_holds_the_state_of_one_part_at_a_time(tmp_path, monkeypatch, asynchronous):
    monkeypatch.setattr(Copies, "held_bytes", 0)
    monkeypatch.setattr(Copies, "most_bytes", 0)
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous)
    checkpointer.save(1, {name: Copies() for name in ("model", "optimizer", "ema")})
    checkpointer.close()
    assert Copies.most_bytes == 4000


def test_the_manifest_says_what_the_checkpoint_was_made_with(tmp_path):
    folder = Checkpointer(tmp_path).save(3, parts(1))
    described = json.loads((folder / "manifest.json").read_text())
    assert described["format"] == 1
    assert described["step"] == 3
    assert described["world_size"] == 1
    assert described["versions"]["torch"] == metadata.version("torch")  # __version__ may say more
    assert described["versions"]["python"].startswith("3.")
    assert described["parts"]["model"] == ["model.json", "model.safetensors"]
    assert described["files"]["model.json"]["bytes"] == (folder / "model.json").stat().st_size


def test_tied_weights_are_stored_once_and_load(tmp_path):
    def tied():
        model = torch.nn.ModuleDict(
            {"embedding": torch.nn.Embedding(50, 8), "head": torch.nn.Linear(8, 50, bias=False)}
        )
        model["head"].weight = model["embedding"].weight
        return model

    saved, loaded = tied(), tied()
    folder = Checkpointer(tmp_path).save(1, {"model": saved})
    assert list(load_file(folder / "model.safetensors")) == ["embedding.weight"]
    Checkpointer(tmp_path).restore({"model": loaded})
    assert torch.equal(loaded["head"].weight, saved["embedding"].weight)
    assert loaded["head"].weight is loaded["embedding"].weight


def test_a_models_extra_state_is_saved_and_restored(tmp_path):
    class WithExtra(torch.nn.Linear):
        extra = None

        def get_extra_state(self):
            return {"calls": (1, self.extra)}

        def set_extra_state(self, state):
            self.extra = state["calls"][1]

    saved, loaded = WithExtra(2, 2), WithExtra(2, 2)
    saved.extra = b"bytes"
    folder = Checkpointer(tmp_path).save(1, {"model": saved})
    Checkpointer(tmp_path).restore({"model": loaded})
    assert loaded.extra == b"bytes"
    assert set(load_file(folder / "model.safetensors")) == {"weight", "bias"}


def test_no_checkpoint_restores_nothing(tmp_path):
    assert Checkpointer(tmp_path / "absent").restore(parts()) is None
    assert Checkpointer(tmp_path / "absent").steps() == []
    assert not (tmp_path / "absent").exists()


def test_the_newest_is_the_one_saved_last_and_steps_are_in_their_own_order(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for step in (9, 100, 20):
        checkpointer.save(step, parts(step))
    assert restored(checkpointer) == (20, 20)
    assert checkpointer.steps() == [9, 20, 100]


def test_a_checkpoint_can_be_named_or_moved(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, parts(step * 10))
    into = parts()
    assert checkpointer.restore(into, checkpointer.path(1)) == 1
    assert number_of(into) == 10
    checkpointer.path(1).rename(tmp_path / "best")
    assert checkpointer.restore(parts(), tmp_path / "best") == 1
    assert checkpointer.restore(into, str(tmp_path)) == 2
    assert number_of(into) == 20
    assert Checkpointer(tmp_path / "elsewhere").restore(parts(), tmp_path) == 2


def test_fewer_parts_than_were_saved_may_be_restored(tmp_path):
    Checkpointer(tmp_path).save(1, parts(10))
    model = Values()
    assert Checkpointer(tmp_path).restore({"model": model}) == 1
    assert model.number == 10


def test_a_part_that_was_not_saved_is_an_error_that_says_what_there_is(tmp_path):
    Checkpointer(tmp_path).save(1, {"model": Values(1), "extra": Values(1)})
    message = (
        "checkpoint-1: there is no 'scheduler' and no 'ema' in it, only extra, model — use the options of the "
        "run that saved it, or restore only parts that are there"
    )
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path).restore({"model": Values(), "scheduler": Values(), "ema": Values()})


def test_a_checkpoint_of_the_model_only_says_so(tmp_path):
    Checkpointer(tmp_path).save(1, {"model": Values(1), "trainer_state": Values(1)})
    with pytest.raises(CheckpointError, match="it was saved with the model only, and a run cannot resume from that"):
        Checkpointer(tmp_path).restore({"model": Values(), "optimizer": Values()})


def test_a_model_of_another_shape_is_an_error_that_names_the_checkpoint_and_the_weight(tmp_path):
    Checkpointer(tmp_path).save(1, {"model": torch.nn.Linear(3, 2), "extra": Values(10)})
    extra = Values()
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint-1 does not fit: part 'model' refused its state: .*\n.*size mismatch for weight",
    ):
        Checkpointer(tmp_path).restore({"model": torch.nn.Linear(4, 2), "extra": extra})
    with pytest.raises(CheckpointError, match=r"Unexpected key.*bias"):
        Checkpointer(tmp_path).restore({"model": torch.nn.Linear(3, 2, bias=False), "extra": extra})
    assert extra.number == 0


def test_nothing_is_loaded_before_everything_is_read(tmp_path):
    """A checkpoint whose hashes are right and whose last part cannot be decoded."""
    from tr_ckpt import files, manifest

    folder = Checkpointer(tmp_path).save(1, parts(10))
    (folder / "extra.json").write_text('{"$future": 1}')
    described = manifest.read(folder)
    described.files["extra.json"] = files.record(folder / "extra.json")
    (folder / "manifest.json").unlink()
    manifest.write(folder, described)
    into = parts()
    with pytest.raises(CheckpointError, match=r"checkpoint-1: extra.json: '\$future' is not known"):
        Checkpointer(tmp_path).restore(into, folder)
    assert number_of(into) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "no checkpoint at .*there: there is no such folder"),
        (lambda p: p.write_text("x"), "no checkpoint at .*there: there is no such folder"),
        (lambda p: (p.parent / "checkpoint-5").mkdir(), "no such folder; .* has checkpoint-5"),
        (
            lambda p: p.mkdir(),
            "it holds neither a manifest.json nor folders named checkpoint-<step>; give a checkpoint",
        ),
        (lambda p: (p / "checkpoint-3").mkdir(parents=True), "no valid checkpoint in .*there: all 1 are damaged"),
    ],
    ids=["absent", "file", "beside", "empty", "foreign"],
)
def test_a_source_without_a_checkpoint_is_an_error(make, message, tmp_path):
    make(tmp_path / "there")
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path).restore(parts(), tmp_path / "there")


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {**parts(10), "more": Values(10)})
    checkpointer.save(1, parts(20))
    assert restored(checkpointer) == (1, 20)
    assert not (checkpointer.path(1) / "more.json").exists()
    assert listed(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_another_program_left_in_the_place_is_kept(kind, tmp_path, caplog):
    place = tmp_path / "checkpoint-1"
    if kind == "folder":
        place.mkdir()
        (place / "optimizer.pt").write_bytes(b"precious")
    elif kind == "file":
        place.write_bytes(b"precious")
    else:
        place.symlink_to(tmp_path / "nowhere")
    with caplog.at_level(logging.WARNING):
        Checkpointer(tmp_path).save(1, parts(10))
    kept = tmp_path / "checkpoint-1.replaced-1"
    assert "so it is kept as checkpoint-1.replaced-1" in caplog.text
    if kind == "folder":
        assert (kept / "optimizer.pt").read_bytes() == b"precious"
    elif kind == "file":
        assert kept.read_bytes() == b"precious"
    else:
        assert kept.is_symlink()
    assert Checkpointer(tmp_path).restore(parts()) == 1


def test_files_that_the_caller_adds_are_verified_as_the_others_are(tmp_path):
    def write_extra(folder):
        (folder / "config.json").write_text('{"model_type": "x"}')
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocabulary.txt").write_text("a b")

    folder = Checkpointer(tmp_path).save(1, parts(10), write_extra=write_extra)
    assert (folder / "config.json").read_text() == '{"model_type": "x"}'
    (folder / "tokenizer" / "vocabulary.txt").write_text("a c")
    with pytest.raises(DamagedCheckpointError, match=r"tokenizer/vocabulary\.txt was changed after it was written"):
        Checkpointer(tmp_path).restore(parts(), folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "write_extra made 'model.safetensors', which is where the part 'model' goes"),
        ("rng-0.json", "write_extra made 'rng-0.json', which is where the part 'rng' goes"),
        ("manifest.json", "write_extra made 'manifest.json', which is where the manifest goes"),
    ],
)
def test_added_files_cannot_take_the_place_of_a_part(name, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path).save(
            1, {"model": Values(1), "rng": RNGState()}, write_extra=lambda folder: (folder / name).touch()
        )
    assert listed(tmp_path) == []


def test_added_links_are_refused(tmp_path):
    with pytest.raises(OSError, match="weights is a link or no plain file; write_extra must copy it"):
        Checkpointer(tmp_path).save(1, parts(1), write_extra=lambda folder: (folder / "weights").symlink_to(tmp_path))


@pytest.mark.parametrize("name", ["../model", "a/b", "", ".hidden", "a b", "manifest", "Manifest", 3])
def test_a_part_name_that_cannot_name_a_file_is_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match="name"):
        Checkpointer(tmp_path).save(1, {name: Values(1)})
    assert listed(tmp_path) == []


def test_a_part_name_that_is_one_ranks_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="the part name 'rng-0' is that of one rank's files; give another"):
        Checkpointer(tmp_path).save(1, {"rng": RNGState(), "rng-0": Values(1)})


def test_the_random_state_is_restored_after_everything_else(tmp_path):
    class Draws(Values):
        def load_state_dict(self, state_dict):
            torch.rand(3)
            super().load_state_dict(state_dict)

    Checkpointer(tmp_path).save(1, {"rng": RNGState(), "model": Values(1)})
    expected = torch.rand(3)
    Checkpointer(tmp_path).restore({"rng": RNGState(), "model": Draws()})
    assert torch.equal(torch.rand(3), expected)


def test_part_names_that_differ_in_case_alone_are_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match="the part name 'Model' is taken by 'model'; some file systems ignore case"
    ):
        Checkpointer(tmp_path).save(1, {"model": Values(1), "Model": Values(1)})


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, None])
def test_a_step_that_is_no_count_is_refused(step, tmp_path):
    with pytest.raises(CheckpointError, match="is not a count of optimizer steps; give an integer of 0 or more"):
        Checkpointer(tmp_path).save(step, parts(1))


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_last=0 would keep no checkpoint; give 1 or more, or None to keep all"):
        Checkpointer(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="keep_every=0 is not a number of steps; give 1 or more, or None"):
        Checkpointer(tmp_path, keep_every=0)


def test_a_prefix_is_part_of_the_name(tmp_path):
    Checkpointer(tmp_path, prefix="epoch").save(1, parts(10))
    assert (tmp_path / "epoch-1").is_dir()
    assert Checkpointer(tmp_path).steps() == []
    with pytest.raises(CheckpointError, match="'a/b' cannot name a file"):
        Checkpointer(tmp_path, prefix="a/b")


def test_a_failed_save_leaves_the_state_of_the_run_alone(tmp_path):
    run = Run()
    run.train(1)
    before = copy.deepcopy(run.optimizer.state_dict())
    with pytest.raises(CheckpointError, match="bad"):
        Checkpointer(tmp_path).save(1, {**run.parts(), "bad": SimpleNamespace(state_dict=lambda: {"x": object()})})
    assert str(before) == str(run.optimizer.state_dict())
    assert listed(tmp_path) == []


@pytest.mark.parametrize(("limit", "kept"), [(2, [2, 3]), (None, [1, 2, 3]), (0, [1, 2, 3]), (-1, [1, 2, 3])])
def test_arguments_give_the_folder_and_the_limit(limit, kept, tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=limit)
    alone = SimpleNamespace(rank=0, world_size=1, gather_objects=None)
    checkpointer = Checkpointer.from_arguments(args, alone)
    for step in (1, 2, 3):
        checkpointer.save(step, parts(step))
    checkpointer.close()
    assert checkpointer.steps() == kept


def test_arguments_pass_on_who_this_process_is(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=None)
    asked = []

    def gather_objects(value):
        asked.append(value)
        return [value, (None, Failure("OSError: over there"))]

    two = SimpleNamespace(rank=0, world_size=2, gather_objects=gather_objects)
    with pytest.raises(OSError, match="rank 1: OSError: over there"):
        Checkpointer.from_arguments(args, two).save(1, parts(1))
    assert asked


def test_restored_says_what_a_restore_did(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.restored is None
    assert checkpointer.restore(parts()) is None
    assert checkpointer.restored == Restored(None, None, (), frozenset())
    for step in (1, 2):
        checkpointer.save(step, parts(step))
    weights = checkpointer.path(2) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    into = {**parts(), "extra": Values(1)}
    assert checkpointer.restore(into, optional={"extra"}) == 1
    restored = checkpointer.restored
    assert (restored.step, restored.source) == (1, tmp_path / "checkpoint-1")
    assert restored.loaded == set(parts())
    assert restored.states == {}
    [skipped] = restored.skipped
    assert skipped.startswith("checkpoint-2: model.safetensors is 3 bytes short")
    with pytest.raises(DamagedCheckpointError):
        checkpointer.restore(into, checkpointer.path(2))
    assert checkpointer.restored is None


def test_a_part_that_is_only_read_is_checked_and_not_loaded(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"one": Values(1), "two": Values(2)})
    one = Values(7)
    assert checkpointer.restore({"one": one}, only_read=["one", "two"]) == 1
    assert {name: state["number"] for name, state in checkpointer.restored.states.items()} == {"one": 1, "two": 2}
    assert checkpointer.restored.loaded == set()
    assert one.number == 7
    with pytest.raises(CheckpointError, match="there is no 'three' in it, only one, two"):
        checkpointer.restore({}, checkpointer.path(1), only_read=["three"])
    assert checkpointer.restore({}, only_read=["one", "three"], optional=["three"]) == 1
    assert set(checkpointer.restored.states) == {"one"}
