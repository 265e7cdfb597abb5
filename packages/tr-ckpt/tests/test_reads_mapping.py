"""What the system says while a safetensors file is mapped is an error of reading, whatever the library calls it."""

import errno
from pathlib import Path

import pytest
import torch

from tr_ckpt import UnreadableError, reads, tensor_file

SAID = [
    RuntimeError("unable to open file </a/model (1).safetensors> in read-only mode: Stale file handle (116)"),
    RuntimeError("unable to stat the file </a/model.safetensors>: Connection timed out (110)"),
    RuntimeError(
        "unable to mmap 1076 bytes from file </a/model.safetensors>: Input/output error (5)\nException raised"
    ),
    MemoryError("Cannot allocate memory (os error 12)"),
]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(reads, "DELAYS_S", (0.0, 0.0, 0.0))
    tensor_file.write(tmp_path / "model.safetensors", {"one": torch.ones(3)})
    return tmp_path / "model.safetensors"


def failing(monkeypatch, error, times):
    really, left = reads.safe_open, [times]

    def opened(*arguments, **options):
        if left[0]:
            left[0] -= 1
            raise error
        return really(*arguments, **options)

    monkeypatch.setattr(reads, "safe_open", opened)


@pytest.mark.parametrize("error", SAID)
def test_for_a_moment_it_is_tried_again(file, monkeypatch, error):
    failing(monkeypatch, error, 3)
    assert tensor_file.read(file)["one"].tolist() == [1, 1, 1]
    failing(monkeypatch, error, 1)
    tensor_file.check(file)


@pytest.mark.parametrize("error", SAID)
def test_for_good_it_is_in_words(file, monkeypatch, error):
    failing(monkeypatch, error, -1)
    with pytest.raises(UnreadableError, match=r"model.safetensors cannot be read: .*E[A-Z]+\), 4 times"):
        tensor_file.read(file)


def test_the_number_of_the_error_is_kept(monkeypatch):
    failing(monkeypatch, SAID[0], 1)
    with pytest.raises(OSError, match="Stale file handle") as raised:
        reads.open_tensors(Path("model.safetensors"))
    assert raised.value.errno == errno.ESTALE


def test_what_torch_says_of_anything_else_stays_as_it_is(monkeypatch):
    failing(monkeypatch, RuntimeError("an index is out of range"), 1)
    with pytest.raises(RuntimeError, match="an index"):
        reads.open_tensors(Path("model.safetensors"))
