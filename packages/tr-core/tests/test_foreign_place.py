"""The place in the data of a run that another program began follows from its steps and the share of the pass."""

import pytest
from torch.utils.data import DataLoader, IterableDataset

from tr_core.data.batches import batches_of
from tr_core.data.position import derive_position
from tr_core.data.sampler import EpochSampler, SampledBatches


def data_of(samples, batch_size, world_size=1, drop_last=False):
    options = {"shuffle": True, "seed": 0, "drop_last": drop_last, "world_size": world_size}
    sampler = EpochSampler(samples, batch_size, **options)
    return SampledBatches(DataLoader(list(range(samples)), batch_sampler=sampler), sampler)


def saved(step, epoch=None, size=None, world_size=1, max_steps=None):
    named = {"global_step": step, "epoch": epoch, "train_batch_size": size}
    return {**named, "world_size": world_size, "max_steps": max_steps}


@pytest.mark.parametrize(
    ("step", "place"), [(0, (0, 0)), (1, (0, 8)), (2, (0, 16)), (3, (1, 0)), (5, (1, 16)), (6, (2, 0))]
)
def test_a_step_leads_to_whole_passes_and_the_micro_batches_of_its_steps(step, place):
    """Five micro-batches of 4 make three steps of two, the last of one."""
    data = data_of(18, 4)
    assert derive_position(saved(step), data, 8) == place
    epoch = place[0] + place[1] / 4 / 5
    assert derive_position(saved(step, epoch, 4), data, 8) == place


@pytest.mark.parametrize("batch_size", [1, 2, 4, 6])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_with_another_batch_size_or_accumulation_it_is_where_the_share_of_the_pass_says(batch_size, accumulation):
    """The run was 3 micro-batches of 4 into the second of two passes of 18 samples, one a step."""
    place = derive_position(saved(8, 1 + 3 / 5, 4), data_of(18, batch_size), batch_size * accumulation)
    assert place == (1, 12)


def test_the_processes_of_then_count(tmp_path):
    """Two processes with 2 samples each."""
    assert derive_position(saved(3, 3 / 5, 2, world_size=2), data_of(18, 3), 3) == (0, 12)


def test_a_short_last_batch_that_was_left_out_is_no_part_of_a_pass():
    place = derive_position(saved(6, 1 + 2 / 4, 4), data_of(18, 3, drop_last=True), 3)
    assert place == (1, 8)


def test_a_place_that_fits_nothing_is_refused_with_the_figures():
    message = "at epoch 0.77 after 3 steps, which fits neither 5 micro-batches a pass with 1 a step"
    with pytest.raises(ValueError, match=message):
        derive_position(saved(3, 0.77, 4), data_of(18, 4), 4)
    with pytest.raises(ValueError, match="nor the None samples a device on 1 processes"):
        derive_position(saved(3, 0.77), data_of(18, 4), 4)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


@pytest.mark.parametrize(("epoch", "place"), [(None, (0, 40)), (3 / 8, (0, 24)), (1 + 2 / 8, (1, 16))])
def test_data_of_unknown_length_is_at_the_share_of_the_run_in_its_pass(epoch, place):
    data = batches_of(DataLoader(Stream(), batch_size=4), 4, 1)
    assert derive_position(saved(5, epoch, 4, max_steps=8), data, 8) == place
