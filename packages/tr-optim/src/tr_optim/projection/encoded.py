"""Store a basis in fewer bits than it is computed with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tr_optim.moments.blockwise_int8 import BLOCK, block_count
from tr_optim.projection.basis import Basis

FORMS = ("float32", "bfloat16", "int8", "int4")

# Greatest code. Codes are evenly spaced, because the numbers of a basis have one order of magnitude.
_GREATEST = {"int8": 127, "int4": 7}
_LEAST_SCALE = torch.finfo(torch.float32).tiny

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class EncodedBasis:
    """A basis as stored in a state: `basis_left` and/or `basis_right`, and for integers the scales of their blocks.

    Integers are evenly spaced codes, with a float32 scale for each 256 of them in row-major order, by which the
    greatest is 127 or 7; two of 4 bits share a byte, of rows half the rows apart. The dtype of `basis_left` and
    `basis_right` tells the form: floats, int8, or uint8 for 4 bits. Their last dimension is the rank in each.

    Gradients are projected on the decoded basis, whose columns are orthonormal except for rounding. For random columns,
    4096 x 128, inner products are off by at most 2e-4 (bfloat16), 7e-4 (int8) and 3e-2 (int4), and the 2-norm of
    `Q^T Q - 1` is 9e-4, 3e-3 and 8e-2. A number takes 2, 1.02 and 0.52 bytes.

    Attributes:
        tensors: entries of a state.
        rows: of the left and of the right columns.
        dtype: the computing dtype.
    """

    tensors: State
    rows: tuple[int, int]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        """Number of columns."""
        return next(self.tensors[name] for name in _NAMES if name in self.tensors).shape[-1]

    def decoded(self) -> Basis:
        """Return the basis that gradients are projected on, a new one unless it is kept in full."""
        return Basis(*(self._side(name, rows) for name, rows in zip(_NAMES, self.rows, strict=True)))

    def _side(self, name: str, rows: int) -> torch.Tensor | None:
        kept = self.tensors.get(name)
        if kept is None or kept.is_floating_point():
            return None if kept is None else kept.to(self.dtype)
        codes = kept if kept.dtype == torch.int8 else _unpacked(kept, rows)
        return _times_scales(codes.to(self.dtype), self.tensors[name + _SCALES])


def encode(basis: Basis, form: str) -> EncodedBasis:
    """Return a basis in the form that a state stores.

    Args:
        basis: orthonormal, in the dtype that is computed with; not changed.
        form: one of `FORMS`; `float32` keeps it as it is, float64 too.
    """
    tensors: State = {}
    for name, columns in zip(_NAMES, (basis.left, basis.right), strict=True):
        if columns is None:
            continue
        if form in _GREATEST:
            codes, tensors[name + _SCALES] = _codes(columns, _GREATEST[form])
            tensors[name] = codes if form == "int8" else _packed(codes)
        else:
            tensors[name] = columns.to(torch.bfloat16) if form == "bfloat16" else columns
    some = basis.left if basis.left is not None else basis.right
    assert some is not None
    rows = tuple(0 if columns is None else columns.shape[-2] for columns in (basis.left, basis.right))
    return EncodedBasis(tensors, (rows[0], rows[1]), some.dtype)


def read_encoded(state: State, parameter: torch.Tensor, dtype: torch.dtype) -> EncodedBasis:
    """Return the basis in a parameter's state, which has one."""
    own = {name: state[name] for name in ENTRIES if name in state}
    return EncodedBasis(own, (parameter.shape[-2], parameter.shape[-1]), dtype)


_NAMES, _SCALES = ("basis_left", "basis_right"), "_scales"
ENTRIES = (*_NAMES, *(name + _SCALES for name in _NAMES))


def _codes(columns: torch.Tensor, greatest: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _in_blocks(columns)
    scales = blocks.abs().amax(dim=-1).float().div_(greatest).clamp_(min=_LEAST_SCALE)
    codes = (blocks / scales.to(blocks.dtype).unsqueeze(-1)).round_().to(torch.int8)
    return codes.view(-1)[: columns.numel()].view(columns.shape), scales


def _times_scales(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    blocks = _in_blocks(codes) * scales.to(codes.dtype).unsqueeze(-1)
    return blocks.view(-1)[: codes.numel()].view(codes.shape)


def _in_blocks(columns: torch.Tensor) -> torch.Tensor:
    """Return numbers with a block in each row, zeros after the last."""
    missing = block_count(columns.numel()) * BLOCK - columns.numel()
    flat = columns.reshape(-1)
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    half = -(-codes.shape[-2] // 2)
    shifted = (codes + 8).to(torch.uint8)
    packed = shifted[..., :half, :].clone()
    packed[..., : codes.shape[-2] - half, :] |= shifted[..., half:, :] << 4
    return packed


def _unpacked(packed: torch.Tensor, rows: int) -> torch.Tensor:
    both = torch.cat([packed & 15, (packed >> 4)[..., : rows - packed.shape[-2], :]], dim=-2)
    return both.to(torch.int8) - 8
