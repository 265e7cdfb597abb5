"""State that is sharded over ranks: saved by each its own, loaded by any other number of them."""

import json
import re
from pathlib import Path

import ckpt_shards
import pytest
import torch
from ckpt_workers import run

from tr_ckpt import Checkpointer
from tr_ckpt.sharded import stateful

DOCUMENT = Path(__file__).parent.parent / "docs" / "sharded.md"


def equal(first, second, **tolerance):
    """Assert that two nested states hold the same, numbers to the bit or within a tolerance."""
    if isinstance(first, dict):
        assert list(first) == list(second)
        first, second = list(first.values()), list(second.values())
    if isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            equal(one, other, **tolerance)
    elif isinstance(first, torch.Tensor | float):
        torch.testing.assert_close(first, second, **(tolerance or {"rtol": 0, "atol": 0}))
    else:
        assert first == second


# Sums of gradients are taken in another order on another number of ranks.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


pytestmark = ckpt_shards.trains_sharded


@pytest.fixture(scope="module", params=[True, False], ids=["named", "plain"])
def saved_by_two(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded") / "run"
    run(2, ckpt_shards.train_save_and_train_on, str(directory), request.param)
    return directory, request.param, torch.load(f"{directory}.truth")


@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_what_two_ranks_saved_goes_on_with_any_number_of_ranks(saved_by_two, world_size):
    directory, named, truth = saved_by_two
    run(world_size, ckpt_shards.restore_and_train_on, str(directory), named)
    found = torch.load(f"{directory}.{world_size}")
    equal(found["optimizer"], truth["optimizer"])
    tolerance = {} if world_size == 2 else CLOSE
    equal(found["losses"], truth["losses"][3:], **tolerance)
    equal(found["weights"], truth["weights"], **tolerance)


def test_plain_modules_on_one_process_go_on_from_it(saved_by_two):
    directory, named, truth = saved_by_two
    model, optimizer = ckpt_shards.build(3)
    assert Checkpointer(directory).restore({"model": model, "optimizer": optimizer}) == 3
    equal(ckpt_shards.whole(stateful(model, optimizer)["optimizer"].state_dict()), truth["optimizer"])
    equal(ckpt_shards.train(model, optimizer, range(3, 6)), truth["losses"][3:], **CLOSE)


@pytest.mark.parametrize("by_name", [True, False])
def test_what_one_process_saved_whole_goes_on_sharded(tmp_path, by_name):
    model, optimizer = ckpt_shards.build(1)
    ckpt_shards.train(model, optimizer, range(3))
    Checkpointer(tmp_path / "run").save(
        3, stateful(model, optimizer) if by_name else dict(model=model, optimizer=optimizer)
    )
    at_save = ckpt_shards.whole(stateful(model, optimizer)["optimizer"].state_dict())
    losses = ckpt_shards.train(model, optimizer, range(3, 6))
    run(2, ckpt_shards.restore_trained_whole, str(tmp_path / "run"), by_name)
    for named in (True,) if by_name else (True, False):  # what is kept under names is not taken by number
        found = torch.load(tmp_path / f"run.{named}")
        equal(found["optimizer"], at_save)
        equal(found["losses"], losses, **CLOSE)


def test_each_rank_writes_its_own_shards_and_no_number_twice(saved_by_two):
    directory, _, _ = saved_by_two
    folder = directory / "checkpoint-3"
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json", "model.json", "model.shards.json", "model-shard-0.safetensors", "model-shard-1.safetensors",
        "optimizer.json", "optimizer.shards.json", "optimizer-shard-0.safetensors", "optimizer-shard-1.safetensors",
        "rng-0.json", "rng-0.safetensors", "rng-1.json", "rng-1.safetensors",
    }  # fmt: skip
    index = json.loads((folder / "model.shards.json").read_text())
    first = index["tensors"]["first.weight"]
    assert first == {"dtype": "F32", "shape": [5, 4], "distributed": True, "box": [3, 4], "in": [[0, 2, 1]]}
    assert index["files"] == ["model-shard-0.safetensors", "model-shard-1.safetensors"]
    assert index["tensors"]["last.weight"]["box"] == [1, 3]
    assert index["tensors"]["norm.running_mean"]["in"] == [[0, 1, 1]]


def test_state_of_another_shape_than_its_parameter_s_goes_on_too(tmp_path):
    directory = str(tmp_path / "run")
    run(2, ckpt_shards.train_with_rows, directory)
    truth = torch.load(f"{directory}.truth")
    run(3, ckpt_shards.go_on_with_rows, directory)
    for name in ("run.3", "run.3.begun"):
        equal(torch.load(tmp_path / name), truth, **CLOSE)
    model, optimizer = ckpt_shards.row_scaled(2, False)
    Checkpointer(directory).restore(stateful(model, optimizer))
    equal(ckpt_shards.train(model, optimizer, range(3, 6)), truth, **CLOSE)


def test_tied_weights_are_saved_once_also_where_a_rank_holds_nothing_of_them(tmp_path):
    run(3, ckpt_shards.save_and_restore_tied, str(tmp_path))
    index = json.loads((tmp_path / "checkpoint-1" / "model.shards.json").read_text())
    assert sorted(index["tensors"]) == ["0.bias", "0.weight"]


def test_the_documented_example_runs_and_goes_on_with_any_number_of_ranks(tmp_path):
    [example] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    # The group is there: these processes met in another way than those of a launcher.
    first, last = 'dist.init_process_group("gloo")\n', "dist.destroy_process_group()\n"
    assert example.count(first) == example.count(last) == 1
    example = "import torch\ntorch.manual_seed(0)\n" + example.replace(first, "").replace(last, "")

    def weights(folder):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        assert Checkpointer(folder / "run").restore({"model": model}) == 20
        return list(model.state_dict().values())

    folders = {name: tmp_path / name for name in ("alone", "stopped", "three")}
    for folder in folders.values():
        folder.mkdir()
    run(2, ckpt_shards.run_script, example, str(folders["alone"]))
    for name, world_size in (("stopped", 2), ("three", 3)):
        run(2, ckpt_shards.run_script, example.replace("21)", "13)"), str(folders[name]))
        assert Checkpointer(folders[name] / "run").steps() == [5, 10]
        run(world_size, ckpt_shards.run_script, example, str(folders[name]))
    equal(weights(folders["stopped"]), weights(folders["alone"]))
    equal(weights(folders["three"]), weights(folders["alone"]), **CLOSE)
