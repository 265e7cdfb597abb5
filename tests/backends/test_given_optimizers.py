"""An optimizer that was built before its model is divided trains the parameters that take the place of its own."""

import pytest
import torch
from test_mesh import SHARDED, assert_close, llama, rows

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

pytestmark = pytest.mark.column("fsdp", "mesh")
OVERRIDDEN = "built by an override, and changed"
TWO = {
    "shards": {**SHARDED, "per_device_train_batch_size": 2},
    "tp": {"parallelism_config": "tp=2", "per_device_train_batch_size": 4},
    "pp": {"parallelism_config": "pp=2", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
}


def build(folder, options, optimizers=(None, None), model=None, kind=Trainer):
    args = TrainingArguments(
        folder, max_steps=4, learning_rate=1e-2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True,
        label_names=["labels"], log_level="error", weight_decay=0.1, save_strategy="no", **options,
    )  # fmt: skip
    return kind(model or llama(tie_word_embeddings=True), args, train_dataset=rows(16), optimizers=optimizers)


def optimizer_of(model):
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": norms, "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


class Builds(Trainer):
    """Builds the optimizer itself, of the model as it is."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer, _ = optimizer_of(self.model)
        return self.optimizer


def train(folder, options, way):
    """Run in every rank; returns losses and norms, and the whole weights on rank 0."""
    model = llama(tie_word_embeddings=True)
    if way == "given":
        trainer = build(folder, options, optimizer_of(model), model)
    else:
        trainer = build(folder, options, model=model, kind=Builds)
        trainer.create_optimizer().param_groups[1]["lr"] = 0.05
    given = trainer.optimizer
    trainer.train()
    assert trainer.optimizer is given
    history = [{k: entry[k] for k in ("loss", "grad_norm")} for entry in trainer.state.log_history if "loss" in entry]
    weights = {k: v.clone() for k, v in trainer.strategy.full_state_dict(trainer.model_wrapped).items()}
    trainer.strategy.close()
    return history, weights


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("shards", "given"),
        ("pp", OVERRIDDEN),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("shards", OVERRIDDEN), ("pp", "given"), ("tp", "given"), ("tp", OVERRIDDEN)]
        ),
    ],
)
def test_an_optimizer_of_before_trains_a_divided_model(name, way, tmp_path):
    alone = train(str(tmp_path / "alone"), {"per_device_train_batch_size": 4}, way)
    found = run_ranks(train, 2, str(tmp_path / "two"), TWO[name], way, timeout_s=180)
    for rank in found:
        assert_close(rank, alone, 2e-5)
    assert found[0][1].keys() == alone[1].keys()


def refused(folder):
    """Run in every rank: what cannot be followed, or done, is said."""
    model = llama()
    optimizer, schedule = optimizer_of(model)
    model(input_ids=torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"AdamW cannot follow parameters that it has state of.* has made no step"):
        build(folder, TWO["shards"], (optimizer, schedule), model).train()
    with pytest.raises(ValueError, match=r"bf16_full_eval casts whole weights, and FSDP divides them over processes"):
        build(folder, {**TWO["shards"], "bf16_full_eval": True})
    trainer = build(folder, TWO["shards"])
    trainer.args.bf16_full_eval = True
    with pytest.raises(ValueError, match=r"bf16_full_eval casts whole weights"):
        trainer.evaluate(rows(2))
    trainer.args.bf16_full_eval = False
    trainer.prepare()
    trainer.model.lm_head = torch.nn.Linear(16, 24, bias=False)
    with pytest.raises(
        ValueError, match=r"divided over the processes \[0, 1\] already .* before the Trainer's first tr"
    ):
        trainer.train()


def test_what_a_divided_model_cannot_have_is_refused(tmp_path):
    run_ranks(refused, 2, str(tmp_path), timeout_s=180)
