"""What is changed on one rank alone, and has to be the same on all, ends the run in words: weights would drift."""

import pytest
from shared.data import rows
from shared.models import LinearClassifier

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_dist.testing import run_ranks


class Changes(TrainerCallback):
    """Changes something in step 2, on the first rank or on all."""

    def __init__(self, what, everywhere):
        self.what, self.everywhere = what, everywhere

    def on_step_end(self, args, state, control, optimizer, **kwargs):
        if state.global_step == 2 and (self.everywhere or state.is_world_process_zero):
            if self.what == "rate":
                optimizer.param_groups[0]["lr"] = 0.5
            else:
                args.max_grad_norm = 0.01


def train(folder, what, everywhere):
    args = TrainingArguments(
        folder, per_device_train_batch_size=2, num_train_epochs=1, save_strategy="no", logging_steps=2,
        lr_scheduler_type="constant", disable_tqdm=True, log_level="error", use_cpu=True, strategy="ddp",
        ddp_timeout=60, optim="sgd", learning_rate=0.1,
    )  # fmt: skip
    callbacks = [Changes(what, everywhere)]
    try:
        trainer = Trainer(LinearClassifier(seed=0), args, train_dataset=rows(24), callbacks=callbacks)
        trainer.train()
        result = trainer.state.global_step
    except ValueError as error:
        result = str(error)
    trainer.strategy.close(failed=isinstance(result, str))
    return result


WORDS = {"rate": "lr of parameter group 0 is not the same on all ranks: [0.5, 0.1], by rank",
         "clipping": "args.max_grad_norm is not the same on all ranks: [0.01, 1.0], by rank"}  # fmt: skip


@pytest.mark.parametrize("what", ["rate", "clipping"])
def test_a_change_on_one_rank_alone_is_refused(tmp_path, what):
    for message in run_ranks(train, 2, str(tmp_path), what, False):
        assert message.startswith(WORDS[what])


def test_a_change_on_all_ranks_acts(tmp_path):
    assert run_ranks(train, 2, str(tmp_path), "rate", True) == [6, 6]
