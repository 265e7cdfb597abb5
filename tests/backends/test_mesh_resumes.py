"""A run that is killed again and again, and goes on on another mesh each time: its losses are those of one process."""

import os
import random
import signal

import pytest
import torch
from test_mesh import ALONE, HEADS, SHARDED, SMALL, assert_close, rows
from transformers import LlamaConfig, LlamaForCausalLM

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import RankError, run_ranks

pytestmark = [pytest.mark.column("mesh"), pytest.mark.slow]

LEGS = 30
FORMS = {
    "alone": (1, ALONE),
    "replicas 2": (2, {"per_device_train_batch_size": 2}),
    "shards 2": (2, {"per_device_train_batch_size": 2, **SHARDED}),
    "tp 2": (2, {"parallelism_config": "tp=2"}),
    "sp 2": (2, {"parallelism_config": "sp=2"}),
    "pp 2": (2, {"parallelism_config": "pp=2"}),
    "interleaved": (2, {"parallelism_config": "pp=2", "pp_schedule": "interleaved"}),
    "tp 2, replicas 2": (4, {"parallelism_config": "tp=2", "per_device_train_batch_size": 2}),
    "tp 2, shards 2": (4, {"parallelism_config": "tp=2,dp_shard=2", "per_device_train_batch_size": 2, **SHARDED}),
    "sp 2, tp 2": (4, {"parallelism_config": "sp=2,tp=2"}),
    "pp 2, tp 2": (4, {"parallelism_config": "pp=2,tp=2"}),
    "pp 2, shards 2": (4, {"parallelism_config": "pp=2,dp_shard=2", "per_device_train_batch_size": 2, **SHARDED}),
}


class Killed:
    """Kills its process after a step, in the middle of the next, or not at all."""

    def __init__(self, step, where):
        self.step, self.where = step, where

    def on_step_end(self, args, state, control, **kwargs):
        if self.where == "after a step" and state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.where == "in a step" and state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, options, step, where):
    args = TrainingArguments(
        folder,
        max_steps=2 * LEGS + 2,
        num_train_epochs=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        gradient_accumulation_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        **{"per_device_train_batch_size": 4} | options,
    )
    torch.manual_seed(0)
    sizes = SMALL | HEADS | {"num_hidden_layers": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    trainer = Trainer(model, args, train_dataset=rows(64))
    if where:
        trainer.add_callback(Killed(step, where))
    trainer.train(resume_from_checkpoint=os.path.isdir(folder) and any("checkpoint-" in n for n in os.listdir(folder)))
    history = [{"loss": entry["loss"]} for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.clone() for name, value in trainer.strategy.full_state_dict(trainer.model_wrapped).items()}
    trainer.strategy.close()
    return history, weights


@pytest.mark.row("resize")
def test_thirty_kills_and_as_many_meshes(tmp_path, record_property):
    chosen, forms = random.Random(30), list(FORMS)
    order, last = [], ""
    for _ in range(LEGS):
        last = chosen.choice([form for form in forms if form != last])
        order.append(last)
    folder = str(tmp_path / "out")
    for leg, form in enumerate(order):
        print(leg, form, flush=True)
        world, options = FORMS[form]
        where = chosen.choice(("after a step", "in a step"))
        with pytest.raises(RankError):
            run_ranks(train, world, folder, options, 2 * leg + 2, where, timeout_s=300)
    history, weights = run_ranks(train, 1, folder, ALONE, 0, "", timeout_s=300)[0]
    whole = run_ranks(train, 1, str(tmp_path / "whole"), ALONE, 0, "", timeout_s=300)[0]
    assert_close((history, weights), whole, 1e-4)
    record_property("legs", " -> ".join(order))
