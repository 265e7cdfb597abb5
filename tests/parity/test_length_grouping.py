"""Grouping by length: the reference's order for the same permutation, which holds where the reference's does not."""

import parity_data as data
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, run
from torch import nn
from torch.nn import functional as F
from transformers.trainer_pt_utils import LengthGroupedSampler

from tr_core.testing import LengthGrouping

GROUPED = {"train_sampling_strategy": "group_by_length"}


def lengths_of(number, longest, seed):
    return torch.randint(1, longest + 1, (number,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("batch_size", [1, 4, 7, 64])
@pytest.mark.parametrize("number", [1, 3, 16, 100, 1000, 5000])
@pytest.mark.parametrize("longest", [3, 1000])  # with many of equal length, and few
def test_the_order_is_that_of_the_reference_for_the_same_permutation(number, batch_size, longest):
    lengths = lengths_of(number, longest, seed=number + batch_size)
    for seed in range(3):
        sampler = LengthGroupedSampler(
            batch_size, lengths=lengths.tolist(), generator=torch.Generator().manual_seed(seed)
        )
        shuffled = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
        assert LengthGrouping(lengths, batch_size).arrange(shuffled).tolist() == list(sampler)


class Ragged(nn.Module):
    """Predicts the mean of a sequence of any length."""

    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, input_ids, attention_mask, labels):
        total = (input_ids * attention_mask).sum(1, keepdim=True).float()
        return {"loss": F.mse_loss(self.layer(total / 100), labels)}


def ragged(number=40):
    lengths = lengths_of(number, 30, seed=0).tolist()
    ids = [torch.full((length,), 1 + index % 5) for index, length in enumerate(lengths)]
    return data.Samples([{"input_ids": row, "labels": torch.tensor([float(len(row))])} for row in ids])


def pad(samples):
    rows = [sample["input_ids"] for sample in samples]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.stack([sample["labels"] for sample in samples])
    return {"input_ids": padded, "attention_mask": (padded > 0).long(), "labels": labels}


def scenario(**arguments):
    return Scenario(Ragged, ragged(), arguments={**GROUPED, **arguments}, options={"data_collator": pad})


def widths(outcome):
    return [batch["input_ids"].shape[1] for batch in outcome.batches.train]


def test_both_begin_with_the_longest_sample_and_save_the_same_padding(tmp_path):
    outcomes = [run(side, scenario(), tmp_path / side.name) for side in (REFERENCE, OURS)]
    for outcome in outcomes:
        assert widths(outcome)[0] == max(len(sample["input_ids"]) for sample in ragged().samples)
    theirs, ours = (sum(widths(outcome)) for outcome in outcomes)
    random = run(OURS, Scenario(Ragged, ragged(), options={"data_collator": pad}), tmp_path / "random")
    assert ours == pytest.approx(theirs, rel=0.1)
    assert ours < 0.85 * sum(widths(random))
