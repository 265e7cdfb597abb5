"""Files of shards that do not fit together, names that would be taken, and the export of one model."""

import json
import os
import sys
import warnings

import ckpt_shard_faults
import pytest
import torch
from ckpt_faults import Faults, Killed, forget_temporaries
from ckpt_shards import DTYPES, Buffers, Holder, build, numbers, save_in, train
from ckpt_workers import run
from safetensors import safe_open
from safetensors.torch import load_file

from tr_ckpt import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpointError,
    manifest,
    plan,
    reader,
    shard_index,
    tensor_file,
)
from tr_ckpt.reader import CheckpointReader
from tr_ckpt.shard_index import Chunk, SavedTensor
from tr_ckpt.sharded import export

SHARDS = [f"held-shard-{rank}.safetensors" for rank in range(4)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of 4 ranks, each tensor sharded by its rows, with files that the caller added."""
    directory = tmp_path_factory.mktemp("files") / "run"
    run(4, save_in, {"0": str(directory)})
    return directory / "checkpoint-1"


def tensors_of(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def resealed(folder, target, change):
    """A copy of a checkpoint with changed files, whose manifest says that they are as they were saved."""
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    change(content)
    target.mkdir()
    for name, data in content.items():
        (target / name).write_bytes(data)
    described = manifest.read(folder)
    files = {name: manifest.files.record(target / name) for name in content if name != "manifest.json"}
    parts = {part: [name for name in owned if name in files] for part, owned in described.parts.items()}
    (target / "manifest.json").unlink()
    manifest.write(
        target, manifest.describe(1, 4, [{part: {n: files[n] for n in owned}} for part, owned in parts.items()])
    )
    return target


def index_changed(path, value, *, is_first_format=False):
    def change(content):
        index = json.loads(content["held.shards.json"])
        if is_first_format:
            index["tensors"]["held.0.even"] = {
                "dtype": tensor_file.DTYPES[DTYPES["even"]], "shape": [8, 4], "distributed": True,
                "chunks": [{"file": SHARDS[rank], "offset": [2 * rank, 0], "size": [2, 4]} for rank in range(4)],
            }  # fmt: skip
        place = index
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        content["held.shards.json"] = json.dumps(index).encode()

    return change


EVEN = ("tensors", "held.0.even")


def listed_changed(path, value):
    """A change of the chunks of a tensor that lists them, as the first format does."""
    return index_changed((*EVEN, "chunks", *path), value, is_first_format=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (index_changed(("format",), 3), "its format is 3; this version reads up to 2"),
        (index_changed(("files",), SHARDS * 2), "it lists more files than this part has"),
        (index_changed(("files",), 3), "it lists more files than this part has"),
        (index_changed(("files", 1), "../a"), "in '../a', which is not a file of this part"),
        (index_changed((*EVEN, "box"), [1, 4]), "the chunks of 'held.0.even' do not fill its shape [8, 4]"),
        (index_changed((*EVEN, "box"), [2]), "the chunks of 'held.0.even' do not fill its shape [8, 4]"),
        (index_changed((*EVEN, "box"), [2, 0]), "the chunks of 'held.0.even' do not fill its shape [8, 4]"),
        (index_changed((*EVEN, "box"), [2, 5]), "the chunks of 'held.0.even' do not fill its shape [8, 4]"),
        (index_changed((*EVEN, "in"), [[0, 3, 1]]), "the chunks of 'held.0.even' do not fill its shape [8, 4]"),
        (index_changed((*EVEN, "in"), [[0, 2**62, 1]]), "the chunks of 'held.0.even' do not fill its shape [8, 4]"),
        (index_changed((*EVEN, "in"), [[1, 4, 1]]), "held.shards.json cannot be read"),
        (index_changed((*EVEN, "in"), [[0, 4]]), "held.shards.json cannot be read"),
        (index_changed((*EVEN, "dtype"), "F3"), "has no dtype 'F3'; a newer one wrote it"),
        (index_changed((*EVEN, "shape"), [8, 5]), "the chunks of 'held.0.even' do not fill its shape [8, 5]"),
        (index_changed((*EVEN, "shape"), [8, -4]), "[8, -4] is not a list of lengths"),
        (
            listed_changed((), [{"file": SHARDS[0], "offset": [7, 0], "size": [2, 4]}]),
            "a chunk of 'held.0.even' lies outside its shape [8, 4]",
        ),
        (listed_changed((1, "offset"), [0, 0]), "the chunks of 'held.0.even' do not fill its shape"),
        (listed_changed((1, "offset"), [2]), "a chunk of 'held.0.even' lies outside its shape"),
        (listed_changed((1, "file"), "../a"), "in '../a', which is not a file of this part"),
        (index_changed((*EVEN, "in"), [[1, 3, 1], [0, 1, 1]]), None),  # the same sizes, other numbers: only hashes tell
        (listed_changed((), 3), "held.shards.json cannot be read"),
        (index_changed((*EVEN, "dtype"), "F32"), f"is of {DTYPES['even']}, not torch.float32"),
        (lambda content: content.update({"held.shards.json": b"[]"}), "held.shards.json cannot be read"),
        (lambda content: content.update({"held.shards.json": b"{"}), "held.shards.json cannot be read"),
        (lambda content: content.update({SHARDS[1]: b"short"}), "in held-shard-1.safetensors, which has 5"),
        (lambda content: content.update({SHARDS[0]: content[SHARDS[1]]}), "held-shard-0.safetensors: "),
        (lambda content: content.update({"held.json": b'{"$tensor": "other"}'}), "tensor 'other' is in no file of it"),
    ],
    ids=lambda value: "change" if callable(value) else str(value),
)
def test_files_that_do_not_fit_together_are_refused_in_words(saved, tmp_path, change, message):
    folder = resealed(saved, tmp_path / "checkpoint-1", change)
    held = Holder({name: torch.zeros_like(tensor) for name, tensor in numbers().items()})
    if message is None:
        assert Checkpointer(tmp_path).restore({"held": held}, folder) == 1
        return
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path).restore({"held": held}, folder)
    assert message in str(caught.value)
    assert all(not tensor.any() for tensor in held.tensors.values())


def whole(length, *chunks):
    """An index of one tensor of bytes, all of whose chunks are in the file `a`."""
    placed = [{"file": "a", "offset": list(offset), "size": list(size)} for offset, size in chunks]
    tensor = {"dtype": "U8", "shape": list(length), "distributed": True, "chunks": placed}
    return json.dumps({"format": 1, "tensors": {"w": tensor}})


@pytest.mark.parametrize(
    ("length", "chunks"),
    [
        ((4,), [((0,), (3,)), ((1,), (1,))]),  # as many numbers, and the last is not there
        ((4,), [((0,), (2,)), ((0,), (2,))]),
        ((4,), [((0,), (2,)), ((1,), (2,))]),
        ((2, 2), [((0, 0), (1, 2)), ((0, 1), (2, 1))]),
        ((2, 2), [((0, 0), (1, 1)), ((1, 1), (1, 1))]),
        ((2, 2), []),
        ((0,), [((0,), (0,))]),
        ((2,) * 9, [((0,) * 9, (1,) * 9)]),
    ],
)
def test_chunks_that_leave_a_gap_or_overlap_are_refused(length, chunks, tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    (tmp_path / "w.shards.json").write_text(whole(length, *chunks))
    with pytest.raises(CheckpointError, match="do not fill its shape|lies outside its shape"):
        shard_index.read(tmp_path / "w.shards.json", ["a"])


def test_boxes_of_any_kind_that_fill_a_whole_are_taken():
    from tr_ckpt import shard_index as tiling

    assert tiling.is_filled((), [((), ())])
    assert not tiling.is_filled((), [])
    assert tiling.is_filled((3, 0), [])
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert tiling.is_filled((3, 3), wheel)
    assert not tiling.is_filled((3, 3), wheel[:-1])
    assert not tiling.is_filled((3, 3), [*wheel, wheel[0]])
    assert tiling.is_filled((4, 5, 6), [((a, 0, c), (2, 5, 3)) for a in (0, 2) for c in (0, 3)])


@pytest.mark.parametrize("length", [10**12, 2**62, 2**64])
def test_an_index_of_more_than_its_files_hold_takes_no_memory(length, tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    (tmp_path / "w.shards.json").write_text(whole((length,), ((0,), (length,))))
    with pytest.raises(CheckpointError, match=r"it places [\d,]+ bytes in a, which has 100|is not a list of lengths"):
        shard_index.read(tmp_path / "w.shards.json", ["a"])


def test_an_index_reads_back_as_it_was_written(tmp_path):
    for name, size in (("a", 400), ("b", 400)):
        (tmp_path / name).write_bytes(bytes(size))
    index = {
        "w": SavedTensor(torch.bfloat16, (4, 2), True, (Chunk("a", (0, 0), (3, 2)), Chunk("b", (3, 0), (1, 2)))),
        "none": SavedTensor(torch.int8, (0, 2), False, ()),
        "one": SavedTensor(torch.float64, (), True, (Chunk("a", (), ()),)),
        "last": SavedTensor(torch.int8, (5,), True, (Chunk("b", (0,), (2,)), Chunk("a", (2,), (3,)))),
        "rows": SavedTensor(torch.int8, (2, 2), True, (Chunk("b", (0, 0), (1, 2)), Chunk("b", (1, 0), (1, 2)))),
    }
    path = tmp_path / "w.shards.json"
    path.write_bytes(shard_index.dump(index))
    assert shard_index.read(path, ["a", "b"]) == index


def index_of(ranks, tensors=14):
    """An index of tensors that ranks share, in each of the usual ways: by rows, by rows and columns, by strides."""
    files = [f"model-shard-{rank}.safetensors" for rank in range(ranks)]
    index = {}
    for number in range(tensors):
        shape, box = ((8 * ranks, 4), (8, 4)) if number % 2 else ((4 * ranks, 16), (8, 8))
        boxes = list(shard_index._grid(shape, box))
        order = [files[(each * 8) % ranks + each * 8 // ranks] for each in range(ranks)] if number % 3 else files
        chunks = tuple(Chunk(file, *each) for file, each in zip(order, boxes, strict=True))
        index[f"layers.{number}.weight"] = SavedTensor(torch.int8, shape, True, chunks)
    return index, files


def test_a_line_of_the_index_is_as_long_for_many_ranks_as_for_few(tmp_path):
    few, many = (len(shard_index.dump({**index_of(ranks)[0]}).split(b"tensors")[1]) for ranks in (16, 1024))
    assert many < 1.5 * few
    index, files = index_of(64)
    for file in files:
        (tmp_path / file).write_bytes(bytes(2000))
    path = tmp_path / "model.shards.json"
    path.write_bytes(shard_index.dump(index))
    assert path.read_text().count("\n") == 1 + len(index) + 1
    assert shard_index.read(path, files) == index


def test_an_index_of_more_chunks_than_its_files_can_name_is_refused(tmp_path):
    index, files = index_of(64)
    for file in files:
        (tmp_path / file).write_bytes(bytes(500))  # enough for the numbers, and not for their names
    path = tmp_path / "model.shards.json"
    path.write_bytes(shard_index.dump(index))
    with pytest.raises(CheckpointError, match=r"it places \d+ bytes in model-shard-0.safetensors, which has 500"):
        shard_index.read(path, files)


def test_an_index_that_could_not_be_read_back_is_not_written(tmp_path):
    run(2, ckpt_shard_faults.hold_too_much, str(tmp_path))
    assert not (tmp_path / "checkpoint-1").exists()


@pytest.mark.parametrize("name", ["held.shards", "held-shard-3"])
def test_a_part_cannot_have_the_name_of_the_files_of_another(tmp_path, name):
    with pytest.raises(CheckpointError, match="give another"):
        Checkpointer(tmp_path).save(1, {name: Holder({})})


@pytest.mark.parametrize("file", ["held.shards.json", "held-shard-0.safetensors"])
def test_a_file_of_the_caller_cannot_have_the_name_of_a_shard(tmp_path, file):
    with pytest.raises(CheckpointError, match=f"write_extra made '{file}', which is where the part 'held' goes"):
        Checkpointer(tmp_path).save(1, {"held": Holder({})}, write_extra=lambda folder: (folder / file).write_text(""))


def test_a_part_that_each_rank_saves_for_itself_holds_no_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "may_exist", lambda: True)
    monkeypatch.setattr(plan, "find_distributed", lambda state: iter([("held", None)]))
    with pytest.raises(CheckpointError, match="rng holds DTensors, and each rank saves a state of its own there;"):
        Checkpointer(tmp_path).save(1, {"rng": Holder({})})


def test_shards_are_read_by_a_torch_without_distributed(saved, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint", None)
    held = Holder({name: torch.zeros_like(tensor) for name, tensor in numbers().items()})
    assert Checkpointer(tmp_path).restore({"held": held}, saved) == 1
    assert all(torch.equal(held.tensors[name], tensor) for name, tensor in numbers().items())


def test_a_pickled_checkpoint_of_torch_is_refused_in_words(tmp_path):
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(
        CheckpointError, match="theirs was written by torch.distributed.checkpoint; its .metadata is a pickle"
    ):
        Checkpointer(tmp_path).restore({"held": Holder({})}, tmp_path / "theirs")


def test_shards_become_one_model(saved, tmp_path):
    paths = export(saved, tmp_path / "model", part="held")
    assert paths == [tmp_path / "model" / "model.safetensors"]
    found = load_file(paths[0])
    expected = {f"held.0.{name}": tensor for name, tensor in numbers().items()}
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in expected.items()
    )
    with safe_open(paths[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def extra(folder):
    (folder / "config.json").write_text('{"hidden": 4}')
    (folder / "tokenizer" / "deep").mkdir(parents=True)
    (folder / "tokenizer" / "deep" / "vocab.txt").write_text("a b")
    (folder / "tokenizer" / "empty.txt").write_text("")


@pytest.fixture
def trained(tmp_path):
    """A checkpoint of one process without a mesh, with files that the caller added."""
    model, optimizer = build(1)
    train(model, optimizer, range(2))
    path = Checkpointer(tmp_path / "run").save(2, {"model": model, "optimizer": optimizer}, write_extra=extra)
    return path, model


def test_a_model_that_was_saved_whole_is_exported_alike_with_the_files_beside_it(trained, tmp_path):
    path, model = trained
    (tmp_path / "out").mkdir()  # an empty folder may be there
    exported = export(path, str(tmp_path / "out"))
    assert [file.relative_to(tmp_path / "out").as_posix() for file in exported] == [
        "config.json", "model.safetensors", "tokenizer/deep/vocab.txt", "tokenizer/empty.txt",
    ]  # fmt: skip
    for file in ("config.json", "tokenizer/deep/vocab.txt"):
        assert (tmp_path / "out" / file).read_bytes() == (path / file).read_bytes()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())


def test_an_export_converts_what_is_floating_point(trained, tmp_path):
    path, model = trained
    [file] = [file for file in export(path, tmp_path / "out", dtype=torch.bfloat16) if file.suffix == ".safetensors"]
    for name, tensor in load_file(file).items():
        expected = model.state_dict()[name]
        assert torch.equal(tensor, expected.bfloat16() if expected.is_floating_point() else expected)
        assert tensor.dtype == (torch.bfloat16 if expected.is_floating_point() else torch.int64)


@pytest.mark.parametrize("limit", [1, 100, 200, 10**6])
def test_an_export_keeps_to_the_size_of_a_file(trained, tmp_path, limit):
    path, model = trained
    export(path, tmp_path / "out", max_shard_bytes=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = tensors_of(tmp_path / "out")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    for file in files:
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= limit or len(sizes) == 1
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1) == (limit < 10**6)
    if index.exists():
        content = json.loads(index.read_text())
        assert content["metadata"] == {"total_size": sum(tensor.nbytes for tensor in found.values())}
        assert {file.name for file in files} == set(content["weight_map"].values())
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        for name, file in content["weight_map"].items():
            assert name in load_file(tmp_path / "out" / file)


def test_an_export_holds_no_more_than_two_tensors_at_a_time(saved, tmp_path, monkeypatch):
    import weakref

    alive, most = weakref.WeakSet(), []
    original = CheckpointReader.tensor

    def watched(*arguments):
        tensor = original(*arguments)
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(CheckpointReader, "tensor", watched)
    export(saved, tmp_path / "model", part="held")
    assert len(most) == len(numbers())
    assert max(most) <= 2


def test_an_export_refuses_what_it_cannot_do(trained, tmp_path):
    path, _ = trained
    for options, message in [
        ({"dtype": torch.int8}, "dtype=torch.int8 is none that floating-point weights are kept in"),
        ({"max_shard_bytes": 0}, "max_shard_bytes=0 holds no tensor; give 1 or more, or None"),
        ({"part": "ema"}, "checkpoint-2: there is no 'ema' in it, only model, optimizer"),
        ({"target": path.parent}, "exists and is not an empty folder; give another"),
        ({"target": path / "config.json"}, "exists and is not an empty folder; give another"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            export(path, **{"target": tmp_path / "out", **options})
    Checkpointer(tmp_path / "other").save(1, {"model": Holder({})})
    with pytest.raises(CheckpointError, match="the part 'model' holds no tensors"):
        export(tmp_path / "other" / "checkpoint-1", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_not_exported(trained, tmp_path):
    path, _ = trained
    (path / "config.json").write_text('{"hidden": 5}')
    with pytest.raises(DamagedCheckpointError, match="checkpoint-2: config.json was changed after it was written"):
        export(path, tmp_path / "out")
    (path / "config.json").write_text('{"hidden": 4}')
    (path / "optimizer.json").write_text("damaged, and not wanted")
    with pytest.raises(DamagedCheckpointError, match="optimizer.json"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_appears_whole_or_not_at_all(saved, tmp_path):
    with Faults() as counted:
        export(saved, tmp_path / "all" / "model", part="held")
    operations = len(counted.log)
    assert operations > 8
    for at in range(1, operations + 1):
        target = tmp_path / f"{at}" / "model"
        with Faults(at, "error"):
            try:
                export(saved, target, part="held")
            except OSError:
                assert not target.exists() or counted.log[at - 1] == "sync_folder"
        if target.parent.exists():
            assert [path.name for path in target.parent.iterdir()] in ([], ["model"])
        killed = tmp_path / f"killed-{at}" / "model"
        with Faults(at, "kill"), pytest.raises(Killed):
            export(saved, killed, part="held")
        if killed.exists():
            assert load_file(killed / "model.safetensors").keys() == {f"held.0.{name}" for name in numbers()}
    forget_temporaries()
    assert os.path.exists(tmp_path / "all" / "model")


def test_every_dtype_is_read_in_slices(tmp_path):
    tensors = {
        str(dtype).removeprefix("torch."): torch.arange(24).reshape(6, 4).to(dtype) for dtype in tensor_file.DTYPES
    }
    tensor_file.write(tmp_path / "held.safetensors", tensors)
    with CheckpointReader(tmp_path, {"held": ["held.safetensors"]}) as opened:
        index = opened.index("held")
        for name, tensor in tensors.items():
            values = opened.slice(name, index[name], index[name].chunks[0], (1, 2), (3, 1))
            assert values.dtype == tensor.dtype
            assert values.view(torch.uint8).tolist() == tensor[1:4, 2:3].contiguous().view(torch.uint8).tolist()
        assert opened.bytes_read == sum(3 * tensor.element_size() for tensor in tensors.values())


def test_a_module_without_dtensors_is_read_as_ever(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError

    Checkpointer(tmp_path).save(1, {"held": Buffers(numbers())})
    monkeypatch.setattr(reader, "fill", refuse)
    module = Buffers({name: torch.zeros_like(tensor) for name, tensor in numbers().items()})
    assert Checkpointer(tmp_path).restore({"held": module}) == 1
    assert torch.equal(module.even, numbers()["even"])
