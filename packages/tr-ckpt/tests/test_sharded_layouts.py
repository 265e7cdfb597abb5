"""Every layout of a tensor over ranks is saved once, and loaded in every other."""

import json
import math

import ckpt_shards
import pytest
import torch
from ckpt_shards import Buffers, Holder
from ckpt_workers import run

from tr_ckpt import Checkpointer, shard_index

# Layouts on 4 ranks: one dimension of a mesh, and two: replicated, sharded in two dimensions and twice in one.
LAYOUTS = ["0", "1", "r", "r0", "0r", "01", "10", "00", "fsdp+tp", "half"]
INTO = {4: ["0", "r1", "11", "fsdp+tp", "half"], 3: ["0", "1"], 2: ["1", "r"]}  # ranks: layouts to load it in
if torch.__version__ < (2, 7):  # its fully_shard does not shard unevenly beside tensor parallelism
    LAYOUTS.remove("fsdp+tp")
    INTO[4].remove("fsdp+tp")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where what 4 ranks saved in each layout is."""
    folder = tmp_path_factory.mktemp("layouts")
    directories = {layout: str(folder / layout) for layout in LAYOUTS}
    run(4, ckpt_shards.save_in, directories)
    return directories


@pytest.mark.parametrize(
    "world_size", [pytest.param(size, marks=pytest.mark.slow) if size == 4 else size for size in INTO]
)
def test_what_was_saved_in_any_layout_is_loaded_in_any_other(saved, world_size):
    run(world_size, ckpt_shards.restore_in, INTO[world_size], list(saved.values()))


def test_what_was_saved_in_any_layout_is_loaded_without_one(saved):
    expected = ckpt_shards.numbers()
    for directory in saved.values():
        held = Holder({name: torch.zeros_like(tensor) for name, tensor in expected.items()})
        assert Checkpointer(directory).restore({"held": held}) == 1
        assert all(torch.equal(tensor, expected[name]) for name, tensor in held.tensors.items())


def test_what_was_saved_whole_is_loaded_in_any_layout(tmp_path):
    Checkpointer(tmp_path).save(1, {"held": Buffers(ckpt_shards.numbers())})
    run(4, ckpt_shards.restore_whole_in, ["0", "1", "r0", "01", "00", "plain"], str(tmp_path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_is_written_once(saved, layout):
    folder = Checkpointer(saved[layout]).path(1)
    index = shard_index.read(folder / "held.shards.json", [path.name for path in folder.iterdir()])
    assert index
    for name, held in index.items():
        assert sum(math.prod(chunk.size) for chunk in held.chunks) == math.prod(held.shape), name
        assert all(math.prod(chunk.size) for chunk in held.chunks), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_of_the_first_format_is_read_alike(saved, layout, tmp_path):
    folder = Checkpointer(saved[layout]).path(1)
    files = [path.name for path in folder.iterdir()]
    index = shard_index.read(folder / "held.shards.json", files)
    for path in folder.glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "held.shards.json").write_text(json.dumps(ckpt_shards.in_format_1(index)))
    assert shard_index.read(tmp_path / "held.shards.json", files) == index


@pytest.mark.parametrize(("layout", "writers"), [("r", 4), ("r0", 4), ("0r", 4), ("half", 2)])
def test_what_several_ranks_hold_is_spread_over_them(saved, layout, writers):
    folder = Checkpointer(saved[layout]).path(1)
    assert len(list(folder.glob("held-shard-*.safetensors"))) == writers
