"""Going on far into a data set costs nothing: what was used before is not touched."""

import pytest
import torch
from torch import nn

from tr_core import Trainer, TrainingArguments

SAMPLES, FIRST_STEPS, FIRST_BATCH = 20_000_000, 10, 1_000_000


class Rows:
    """Twenty million rows that are made when asked for, many at a time, and counted."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        raise AssertionError("one at a time, this would take hours")

    def __getitems__(self, indices):
        self.asked.append(torch.tensor(indices))
        return self.asked[-1]


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return {"loss": (self.weight - x.double().mean()).square().sum().float()}


def train(folder, data, resume, **options):
    args = TrainingArguments(
        output_dir=str(folder),
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        skip_memory_metrics=True,
        learning_rate=0.0,
        **options,
    )
    trainer = Trainer(Mean(), args, train_dataset=data, data_collator=lambda rows: {"x": rows})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    "order", ["random", *(pytest.param(order, marks=pytest.mark.slow) for order in ("sequential", "random_computed"))]
)
def test_a_run_gone_on_with_at_sample_ten_million_touches_no_earlier_sample(order, tmp_path):
    first = Rows()
    options = {"train_sampling_strategy": order, "save_strategy": "steps", "save_steps": FIRST_STEPS}
    large = {"per_device_train_batch_size": FIRST_BATCH, "max_steps": FIRST_STEPS}
    train(tmp_path, first, None, **large, **options)
    used = torch.zeros(SAMPLES, dtype=torch.bool)
    used[torch.cat(first.asked)] = True
    assert int(used.sum()) == FIRST_STEPS * FIRST_BATCH

    second = Rows()
    small = {"per_device_train_batch_size": 16, "max_steps": FIRST_STEPS + 3}
    resumed = train(tmp_path, second, True, **small, **options)
    asked = torch.cat(second.asked)
    assert len(asked) == 3 * 16  # none was read to be thrown away
    assert not used[asked].any()
    assert resumed.state.global_step == FIRST_STEPS + 3
