"""Run the documentation's AdaLomo example with its import line changed, a small model, and no GPU; and resume it."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

sys.path.insert(0, str(Path(__file__).parent))

from scripts_of_the_documentation import run_script, save_small_gemma
from shared.callbacks import Stop, StopAt

# Published in Korean and Arabic; the latter's is the same but for its commas and 100 steps.
EXAMPLE = """
import torch
import datasets
from transformers import TrainingArguments, AutoTokenizer, AutoModelForCausalLM
import trl

train_dataset = datasets.load_dataset('imdb', split='train')

args = TrainingArguments(
    output_dir="./test-lomo",
    max_steps=1000,
    per_device_train_batch_size=4,
    optim="adalomo",
    gradient_checkpointing=True,
    logging_strategy="steps",
    logging_steps=1,
    learning_rate=2e-6,
    save_strategy="no",
    run_name="lomo-imdb",
)

model_id = "google/gemma-2b"

tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id, low_cpu_mem_usage=True).to(0)

trainer = trl.SFTTrainer(
    model=model, 
    args=args,
    train_dataset=train_dataset,
    dataset_text_field='text',
    max_seq_length=1024,
)

trainer.train()
"""  # noqa: W291
STEPS = 12
SHORT = ("max_steps=1000", f"max_steps={STEPS}")
SAVES = ('save_strategy="no"', 'save_strategy="steps", save_steps=4')


@pytest.fixture
def gemma(tmp_path):
    return save_small_gemma(tmp_path / "gemma")


def weights(names):
    return torch.cat([parameter.detach().flatten() for parameter in names["model"].parameters()])


def test_the_adalomo_example_runs_with_activation_checkpointing(gemma, monkeypatch):
    names = run_script(EXAMPLE, gemma, monkeypatch, changes=[SHORT])
    trainer = names["trainer"]
    assert type(trainer.optimizer).__name__ == "AdaLomo"
    assert trainer.state.global_step == STEPS
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in history] == list(range(1, STEPS + 1))
    assert history[0]["learning_rate"] == pytest.approx(2e-6)
    assert history[-1]["learning_rate"] == pytest.approx(2e-6 / STEPS)
    assert all(entry["grad_norm"] > 0 for entry in history)
    assert not list(Path("test-lomo").glob("checkpoint-*"))


@pytest.mark.parametrize("optim", ["adalomo", "lomo"])
def test_with_a_rate_for_a_new_model_it_learns(gemma, monkeypatch, optim):
    changes = [SHORT, ("learning_rate=2e-6", "learning_rate=5e-2"), ('optim="adalomo"', f'optim="{optim}"')]
    trainer = run_script(EXAMPLE, gemma, monkeypatch, changes=changes)["trainer"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2, losses


def test_an_example_that_was_killed_goes_on_to_the_same_weights(gemma, monkeypatch):
    changes = [SHORT, SAVES, ("learning_rate=2e-6", "learning_rate=1e-3")]
    whole = run_script(EXAMPLE, gemma, monkeypatch, changes=changes)
    changes.append(('"./test-lomo"', '"./killed"'))
    with pytest.raises(Stop):
        run_script(EXAMPLE, gemma, monkeypatch, changes=changes, callbacks=[StopAt(6)])
    resumed = run_script(EXAMPLE, gemma, monkeypatch, changes=changes, resume=True)
    assert resumed["trainer"].state.global_step == STEPS
    assert torch.equal(weights(whole), weights(resumed))
    logs = [[entry["loss"] for entry in n["trainer"].state.log_history if "loss" in entry] for n in (whole, resumed)]
    assert logs[0] == logs[1]
