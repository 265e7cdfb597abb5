"""A step of several ranks exchanges what a hand-written loop's does: gradients, and with shards their norm.

The ranks of one machine agree to stop or go on through shared memory.
"""

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_dist.testing import run_ranks

UNITS = {"transformer_layer_cls_to_wrap": ["Sequential"]}
BACKENDS = {"ddp": {"strategy": "ddp"}, "fsdp": {"fsdp": "full_shard auto_wrap", "fsdp_config": UNITS}}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x, labels):
        logits = self.head(self.second(self.first(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class StopsAt(TrainerCallback):
    """Asks for the end of training at a step, as early stopping and the like do."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def train(folder, backend, max_steps, stop_at, save_strategy, accumulation):
    """Return how often each exchange was made in the whole run, and the number of steps."""
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_steps=max_steps,
        logging_steps=1000,
        save_strategy=save_strategy,
        save_steps=1000,
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        **BACKENDS[backend],
    )
    rows = [{"x": torch.randn(8), "labels": torch.tensor(i % 3)} for i in range(256)]
    callbacks = [StopsAt(stop_at)] if stop_at else []
    trainer = Trainer(Network(), args, train_dataset=rows, callbacks=callbacks)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer.train()
    trainer.strategy.close()
    names = Counter(event.name for event in seen.events() if event.name.startswith("c10d::"))
    return names, trainer.state.global_step


@pytest.fixture(scope="module")
def exchanges(tmp_path_factory):
    """Return how often two ranks make each exchange in a run of so many steps; a run is made once."""

    @cache
    def of_run(backend, steps, stops=False, save_strategy="steps", accumulation=1):
        folder, max_steps = str(tmp_path_factory.mktemp("run")), 20 if stops else steps
        stop_at = steps if stops else None
        ranks = run_ranks(train, 2, folder, backend, max_steps, stop_at, save_strategy, accumulation, timeout_s=120)
        assert [end for _, end in ranks] == [steps, steps]
        assert ranks[0][0] == ranks[1][0]
        return ranks[0][0]

    return of_run


def of_a_step(shorter, longer):
    """Return what a run of eight steps exchanges for each step that it has more than one of four."""
    more = {name.removeprefix("c10d::"): longer[name] - shorter[name] for name in longer}
    assert all(count % 4 == 0 for count in more.values()), more
    return {name: count // 4 for name, count in more.items() if count}


# A run that a callback stops at a step, as early stopping does, has no more to exchange than one that comes to its end.
@pytest.mark.parametrize("stops", [False, True], ids=["to the last step", "stopped by a callback"])
def test_a_step_of_ddp_exchanges_gradients_alone(exchanges, stops):
    assert of_a_step(exchanges("ddp", 4, stops), exchanges("ddp", 8, stops)) == {"allreduce_": 1}


@pytest.mark.parametrize("stops", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["to the end", "stopped"])
def test_a_step_of_fsdp_exchanges_shards_and_a_norm(exchanges, stops):
    # Two units and the rest of the model, each gathered in the forward and in the backward.
    expected = {"allreduce_": 1, "_allgather_base_": 6, "_reduce_scatter_base_": 3}
    assert of_a_step(exchanges("fsdp", 4, stops), exchanges("fsdp", 8, stops)) == expected


def test_more_micro_batches_exchange_no_more(exchanges):
    assert exchanges("ddp", 8, accumulation=3) == exchanges("ddp", 8)


def test_a_run_that_saves_nothing_exchanges_as_much(exchanges):
    """A callback of one rank may end it."""
    ends = exchanges("ddp", 4, save_strategy="no"), exchanges("ddp", 8, save_strategy="no")
    assert of_a_step(*ends) == {"allreduce_": 1}
