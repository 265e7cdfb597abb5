import pytest
import torch

from tr_optim.engine.precision import chunks
from tr_optim.moments.blockwise_int8 import BLOCK, SIGNED, UNSIGNED, dequantize, new_codes, quantize_, scales_shape

CODES = [SIGNED, UNSIGNED]
# Where a code keeps 4 bits rather than 3, and where its levels begin to be evenly spaced, as shares of the greatest.
FINE = {SIGNED: 2.0**-4, UNSIGNED: 2.0**-8}
EVEN = {SIGNED: 2.0**-11, UNSIGNED: 2.0**-23}


def numbers(shape, code, seed=0, decades=6.0):
    """Numbers that are many powers of ten apart, positive for an unsigned code."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** -(decades * torch.rand(shape, generator=generator))
    return sizes * torch.randn(shape, generator=generator) if code.is_signed else sizes


def there_and_back(values, code, step=None):
    codes, scales = new_codes(values, code)
    quantize_(codes, scales, values, code, step)
    return dequantize(codes, scales, code)


def greatest_of_blocks(values):
    """The greatest size of each number's block, of the numbers' shape."""
    parts = [part for row in values.abs() for part in row.split(BLOCK)]
    return torch.cat([part.max().expand_as(part) for part in parts]).view(values.shape)


@pytest.mark.parametrize("code", CODES)
def test_every_level_has_its_own_code(code):
    all_codes = torch.arange(code.greatest + 1, dtype=torch.int32).to(code.dtype).unsqueeze(0)
    levels = dequantize(all_codes, torch.ones(1, 1), code)
    assert levels[0, 0] == 0
    assert (levels.diff() > 0).all()
    assert levels[0, -1].item() == pytest.approx(code.greatest_level, rel=1e-6)
    codes, scales = new_codes(levels, code)
    quantize_(codes, scales, levels, code)
    assert torch.equal(codes, all_codes)
    if code.is_signed:
        quantize_(codes, scales, -levels, code)
        assert torch.equal(codes, -all_codes)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("step", [None, 1, 7, 10**9])
def test_a_number_is_kept_to_a_level_next_to_it(code, step):
    values = numbers((40, 700), code)
    kept, share = there_and_back(values, code, step), values.abs() / greatest_of_blocks(values)
    # Levels are 1/8 of their number apart, in the upper half of the codes 1/16, and evenly spaced near 0.
    distance = torch.where(share > FINE[code], 1 / 16, 1 / 8) * (share + EVEN[code])
    error = (kept - values).abs() / greatest_of_blocks(values)
    assert (error <= distance * (1.001 if step is not None else 0.501)).all()
    assert error.max() > 0, "it must round"
    assert ((kept.sign() == values.sign()) | (kept == 0)).all()


@pytest.mark.parametrize("code", CODES)
def test_the_greatest_of_a_block_is_kept(code):
    values = numbers((30, 256), code)
    found = there_and_back(values, code, 3).abs().amax(dim=1)
    torch.testing.assert_close(found, values.abs().amax(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("code", CODES)
def test_over_the_steps_a_number_is_kept_on_the_average(code):
    values = numbers((1, 512), code, decades=3.0)
    mean = torch.stack([there_and_back(values, code, step) for step in range(2048)]).double().mean(dim=0)
    once = (there_and_back(values, code, 0) - values).abs() / greatest_of_blocks(values)
    error = (mean - values).abs() / greatest_of_blocks(values)
    assert once.max() > 1e-2
    assert error.max() < 1e-4


def test_a_second_moment_that_is_not_0_never_becomes_0():
    values = torch.full((600,), 1e-30)
    values[::256] = 1.0
    values[5] = 0.0
    for step in (None, 1, 2, 3):
        kept = there_and_back(values, UNSIGNED, step)
        assert (kept[values > 0] > 0).all()
        assert kept[5] == 0


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((), (1,)),
        ((1,), (1,)),
        ((256,), (1,)),
        ((257,), (2,)),
        ((5, 1), (5, 1)),
        ((2, 512), (2, 2)),
        ((3, 300), (3, 2)),
        ((3, 5, 70), (3, 2)),
        ((2, 3, 4, 5), (2, 1)),
        ((0,), (0,)),
        ((0, 300), (0, 2)),
        ((4, 0), (4, 0)),
    ],
)
def test_any_shape_has_a_scale_for_each_256_elements_of_a_row(code, shape, blocks):
    values = numbers(shape, code, decades=1.0)
    codes, scales = new_codes(values, code)
    assert (codes.shape, codes.dtype) == (values.shape, code.dtype)
    assert scales.shape == scales_shape(values.shape) == blocks
    quantize_(codes, scales, values, code)
    torch.testing.assert_close(dequantize(codes, scales, code), values, rtol=0.13, atol=1e-3)
    if values.numel():
        rows = values.flatten(1) if values.dim() > 1 else values.reshape(1, -1)
        greatest = torch.stack([torch.stack([part.abs().max() for part in row.split(256)]) for row in rows])
        torch.testing.assert_close(scales * code.greatest_level, greatest.view(blocks), rtol=1e-6, atol=0)


@pytest.mark.parametrize("code", CODES)
def test_blocks_of_zeros_and_of_very_small_numbers_stay_what_they_are(code):
    values = torch.zeros(4, 256)
    values[1] = 1e-38
    values[2] = 1e38
    kept = there_and_back(values, code, 5)
    assert torch.equal(kept[[0, 3]], torch.zeros(2, 256))
    torch.testing.assert_close(kept[1:3], values[1:3], rtol=1e-6, atol=1e-39)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_block_and_no_other(code, bad):
    values = numbers((3, 256), code)
    expected = there_and_back(values, code, 2)
    values[1, 7] = bad
    kept = there_and_back(values, code, 2)
    assert not kept[1].isfinite().any()
    assert torch.equal(kept[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("shape", "count"),
    [((7, 900), 7), ((40, 300), 14), ((2, 3, 700), 6), ((3000,), 3), ((3000, 1), 3), ((3, 4000), 12)],
)
def test_pieces_have_the_same_codes_as_the_whole(code, shape, count, monkeypatch):
    monkeypatch.setattr("tr_optim.engine.precision._ON_CPU", 1024)
    values = numbers(shape, code)
    whole, in_pieces = new_codes(values, code), new_codes(values, code)
    quantize_(*whole, values, code, 11)
    pieces = list(chunks(values, *in_pieces))
    assert len(pieces) == count
    for part, codes, scales in pieces:
        assert part.numel() <= 1024
        quantize_(codes, scales, part, code, 11)
        assert torch.equal(dequantize(codes, scales, code).flatten(), there_and_back(part, code, 11).flatten())
    assert torch.equal(whole[0], in_pieces[0])
    assert torch.equal(whole[1], in_pieces[1])


@pytest.mark.parametrize("code", CODES)
def test_rows_have_codes_of_their_own(code):
    """So that they can be divided over ranks, and put together in another way."""
    values = numbers((9, 5, 70), code)
    codes, scales = new_codes(values, code)
    quantize_(codes, scales, values, code, 3)
    for rows in (slice(0, 2), slice(2, 9)):
        part = new_codes(values[rows], code)
        quantize_(*part, values[rows], code, 3)
        assert torch.equal(part[0], codes[rows])
        assert torch.equal(part[1], scales[rows])


@pytest.mark.parametrize("code", CODES)
def test_numbers_that_are_given_are_left_as_they_are(code):
    values = numbers((500,), code)
    before = values.clone()
    there_and_back(values, code, 4)
    assert torch.equal(values, before)


def test_thresholds_change_with_place_and_step():
    values = torch.full((256,), 0.515)
    values[0] = 1.0
    first, second = there_and_back(values, SIGNED, 1), there_and_back(values, SIGNED, 2)
    assert len(first[1:].unique()) == len(second[1:].unique()) == 2
    assert not torch.equal(first, second)
    assert torch.equal(first, there_and_back(values, SIGNED, 1))
