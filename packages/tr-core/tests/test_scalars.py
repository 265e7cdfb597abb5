import torch

from tr_core.data.position import DataPosition
from tr_core.loss import split_loss
from tr_core.metric_means import accumulator_dtype, read_scalars
from tr_core.session import _is_within_epoch


def test_scalars_of_any_shape_and_type_are_read_as_they_are():
    assert read_scalars([]) == []
    assert read_scalars([torch.tensor(0.5)]) == [0.5]
    mixed = [torch.tensor([[2.5]]), torch.tensor(2**53), torch.tensor(True), torch.tensor(0.1, requires_grad=True)]
    assert read_scalars(mixed) == [2.5, 2.0**53, 1.0, float(torch.tensor(0.1))]


def test_sums_are_kept_in_64_bits_where_the_device_has_them():
    assert accumulator_dtype(torch.device("cpu")) == torch.float64
    assert accumulator_dtype(torch.device("mps")) == torch.float32


def test_numbers_beside_a_loss_keep_all_their_digits():
    loss, parts = split_loss({"loss": torch.tensor(1.0), "share": 0.1, "count": 2**53 - 1, "own": torch.tensor([0.5])})
    assert loss.item() == 1.0
    assert {name: value.item() for name, value in parts.items()} == {"share": 0.1, "count": 2**53 - 1, "own": 0.5}


def test_a_run_is_within_an_epoch_from_its_first_sample_to_the_end_of_it():
    cases = ((0, False), (1, False), (9, False), (9, True))
    found = [_is_within_epoch(DataPosition(samples=samples, is_at_epoch_end=ended)) for samples, ended in cases]
    assert found == [False, True, True, False]
