"""Copies on the host: right for every kind of tensor, in memory that is used again."""

import pytest
import torch
from ckpt_parts import bits, of_dtype

from tr_ckpt import tensor_file
from tr_ckpt.host_buffers import HostBuffers


def copied(tensors, buffers=None):
    buffers = buffers or HostBuffers()
    buffers.begin()
    copies = buffers.copy(tensors)
    buffers.finish()
    return copies


@pytest.mark.parametrize("dtype", list(tensor_file.DTYPES), ids=str)
def test_every_dtype_is_copied_bit_for_bit(dtype):
    tensor = of_dtype(dtype)
    copies = copied({"t": tensor, "scalar": tensor[0], "empty": tensor[:0]})
    assert torch.equal(bits(copies["t"]), bits(tensor))
    assert copies["t"].dtype == dtype
    assert copies["scalar"].shape == ()
    assert torch.equal(bits(copies["scalar"]), bits(tensor[0]))
    assert copies["empty"].shape == (0,)
    assert copies["t"].data_ptr() != tensor.data_ptr()


def test_views_of_every_kind_become_dense():
    base = torch.randn(6, 4)
    complex_ = torch.complex(base, base + 1)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1:3],
        "expanded": base[0, 0].expand(3, 5),
        "conjugate": complex_.conj(),
        "negative": complex_.conj().imag,
        "parameter": torch.nn.Parameter(base),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    for name, copy in copied(tensors).items():
        assert torch.equal(copy, tensors[name]), name
        assert copy.is_contiguous(), name
        assert not copy.is_conj(), name
        assert not copy.is_neg(), name
        assert not copy.requires_grad, name


def test_a_state_of_the_same_sizes_takes_the_same_memory():
    buffers = HostBuffers()
    first = copied({"a": torch.ones(3, 4), "b": torch.ones(12), "c": torch.ones(12).double()}, buffers)
    places = {copy.data_ptr() for copy in first.values()}
    second = copied({"x": torch.zeros(12), "y": torch.zeros(2, 6), "z": torch.zeros(12).double()}, buffers)
    assert {copy.data_ptr() for copy in second.values()} == places
    assert buffers.allocations == 3
    assert buffers.held_bytes == 12 * (4 + 4 + 8)
    assert buffers.copied_bytes == 2 * buffers.held_bytes
    assert all(not copy.any() for copy in second.values())


def test_other_sizes_replace_those_of_before():
    buffers = HostBuffers()
    copied({"a": torch.ones(1000), "b": torch.ones(7)}, buffers)
    copied({"a": torch.ones(10), "b": torch.ones(7)}, buffers)
    assert buffers.allocations == 3
    assert buffers.held_bytes == 4 * 17


def test_buffers_serve_in_any_mode():
    buffers = HostBuffers()
    with torch.inference_mode():
        state = {"t": torch.ones(5)}
        assert torch.equal(copied(state, buffers)["t"], state["t"])
    weight = torch.nn.Parameter(torch.full((5,), 2.0))
    assert torch.equal(copied({"t": weight}, buffers)["t"], weight)
    with torch.device("meta"):
        assert copied({"t": weight}, buffers)["t"].device.type == "cpu"
    assert buffers.allocations == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_tensors_of_a_device_are_copied_to_pinned_memory_with_one_wait(monkeypatch):
    waits = []
    original = torch.cuda.Stream.synchronize
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda stream: (waits.append(stream), original(stream)))
    tensors = {str(n): torch.randn(1000, 1000, device="cuda") for n in range(5)}
    buffers = HostBuffers()
    for _ in range(2):
        copies = copied(tensors, buffers)
        assert all(copy.is_pinned() for copy in copies.values())
        assert all(torch.equal(copies[name], tensors[name].cpu()) for name in tensors)
    assert len(waits) == 2
    assert buffers.allocations == 5
