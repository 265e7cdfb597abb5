"""Files that any reader of safetensors loads."""

import json
import sys

import pytest
import torch
from ckpt_parts import bits, of_dtype
from safetensors.torch import load_file, save_file

from tr_ckpt import CheckpointError, tensor_file


@pytest.mark.parametrize("dtype", list(tensor_file.DTYPES), ids=str)
def test_the_library_reads_every_dtype_that_is_written(dtype, tmp_path):
    tensor = of_dtype(dtype)
    tensor_file.write(tmp_path / "t.safetensors", {"t": tensor, "scalar": tensor[0]})
    for loaded in (load_file(tmp_path / "t.safetensors"), tensor_file.read(tmp_path / "t.safetensors")):
        assert loaded["t"].dtype == dtype
        assert torch.equal(bits(loaded["t"]), bits(tensor))
        assert loaded["scalar"].shape == ()


def test_what_the_library_writes_is_read(tmp_path):
    pytest.importorskip("numpy", reason="the library's writer needs it")
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.empty(0, 2)}
    save_file(tensors, tmp_path / "t.safetensors")
    loaded = tensor_file.read(tmp_path / "t.safetensors")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_the_file_says_that_it_is_torchs_and_aligns_every_tensor(tmp_path):
    tensors = {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.ones(1, dtype=torch.float64),
        "c": torch.ones(1).half(),
    }
    tensor_file.write(tmp_path / "t.safetensors", tensors)
    raw = (tmp_path / "t.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        assert (8 + size + entry["data_offsets"][0]) % tensors[name].element_size() == 0


def test_what_was_read_does_not_depend_on_the_file_any_more(tmp_path):
    path = tmp_path / "t.safetensors"
    tensor_file.write(path, {"t": torch.ones(10_000)})
    loaded = tensor_file.read(path)["t"]
    with open(path, "r+b") as file:
        file.truncate(100)
    assert loaded.sum() == 10_000


def test_writing_copies_one_tensor_at_a_time(tmp_path, monkeypatch):
    alive, most = [], 0
    original = torch.Tensor.contiguous

    def contiguous(self):
        nonlocal most
        import weakref

        copy = original(self)
        alive.append(weakref.ref(copy))
        most = max(most, sum(one() is not None for one in alive))
        return copy

    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    tensor_file.write(tmp_path / "t.safetensors", {str(n): torch.randn(9, 9).t() for n in range(8)})
    assert most <= 2


def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path):
    (tmp_path / "t.safetensors").write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(CheckpointError, match=r"t\.safetensors is not a valid safetensors file: "):
        tensor_file.read(tmp_path / "t.safetensors")


def test_a_machine_of_the_other_byte_order_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(CheckpointError, match="holds little-endian numbers and this machine's are big-endian"):
        tensor_file.write(tmp_path / "t.safetensors", {"t": torch.ones(1)})
