"""Run the documentation's GaLore examples with their import line changed, a small model, and no GPU; and resume them.

They stand here as they are published: the first, second and third in Korean; of the Arabic translation, the expressions
that name the modules.
"""

import logging
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

sys.path.insert(0, str(Path(__file__).parent))

from scripts_of_the_documentation import run_script, save_small_gemma
from shared.callbacks import Stop, StopAt

GALORE = """
import torch
import datasets
import trl

from transformers import TrainingArguments, AutoConfig, AutoTokenizer, AutoModelForCausalLM

train_dataset = datasets.load_dataset('imdb', split='train')

args = TrainingArguments(
    output_dir="./test-galore",
    max_steps=100,
    per_device_train_batch_size=2,
    optim="galore_adamw",
    optim_target_modules=["attn", "mlp"]
)

model_id = "google/gemma-2b"

config = AutoConfig.from_pretrained(model_id)

tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_config(config).to(0)

trainer = trl.SFTTrainer(
    model=model, 
    args=args,
    train_dataset=train_dataset,
    dataset_text_field='text',
    max_seq_length=512,
)

trainer.train()
"""  # noqa: W291
OPTIONS = """
import torch
import datasets
import trl

from transformers import TrainingArguments, AutoConfig, AutoTokenizer, AutoModelForCausalLM

train_dataset = datasets.load_dataset('imdb', split='train')

args = TrainingArguments(
    output_dir="./test-galore",
    max_steps=100,
    per_device_train_batch_size=2,
    optim="galore_adamw",
    optim_target_modules=["attn", "mlp"],
    optim_args="rank=64, update_proj_gap=100, scale=0.10",
)

model_id = "google/gemma-2b"

config = AutoConfig.from_pretrained(model_id)

tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_config(config).to(0)

trainer = trl.SFTTrainer(
    model=model, 
    args=args,
    train_dataset=train_dataset,
    dataset_text_field='text',
    max_seq_length=512,
)

trainer.train()
"""  # noqa: W291
LAYERWISE = """
import torch
import datasets
import trl

from transformers import TrainingArguments, AutoConfig, AutoTokenizer, AutoModelForCausalLM

train_dataset = datasets.load_dataset('imdb', split='train')

args = TrainingArguments(
    output_dir="./test-galore",
    max_steps=100,
    per_device_train_batch_size=2,
    optim="galore_adamw_layerwise",
    optim_target_modules=["attn", "mlp"]
)

model_id = "google/gemma-2b"

config = AutoConfig.from_pretrained(model_id)

tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_config(config).to(0)

trainer = trl.SFTTrainer(
    model=model, 
    args=args,
    train_dataset=train_dataset,
    dataset_text_field='text',
    max_seq_length=512,
)

trainer.train()
"""  # noqa: W291
KOREAN, ARABIC = '["attn", "mlp"]', '[r".*.attn.*", r".*.mlp.*"]'
EXAMPLES = {"galore": GALORE, "optim_args": OPTIONS, "layerwise": LAYERWISE}
SAVES = [("max_steps=100", "max_steps=30, save_steps=12, logging_steps=5")]


@pytest.fixture
def gemma(tmp_path):
    return save_small_gemma(tmp_path / "gemma", hidden_size=96)


def weights(names):
    return torch.cat([parameter.detach().flatten() for parameter in names["model"].parameters()])


def ranks(optimizer):
    columns = [s.get("basis_left", s.get("basis_right")) for s in optimizer.state.values()]
    return sorted(basis.shape[-1] for basis in columns if basis is not None)


@pytest.mark.parametrize(
    ("name", "targets"), [*((name, KOREAN) for name in EXAMPLES), ("galore", ARABIC)], ids=[*EXAMPLES, "arabic"]
)
def test_the_galore_examples_train_what_they_name_and_learn(gemma, monkeypatch, name, targets, caplog):
    logged = [("max_steps=100", "max_steps=30, logging_steps=3")]
    with caplog.at_level(logging.INFO, logger="tr_optim"):
        names = run_script(EXAMPLES[name].replace(KOREAN, targets), gemma, monkeypatch, changes=logged)
    trainer = names["trainer"]
    assert trainer.state.global_step == 30
    projected = ranks(trainer.optimizer)
    assert len(projected) == 2 * 7
    assert max(projected) == (64 if name == "optim_args" else 96)
    group = trainer.optimizer.param_groups[0]
    options = (group["rank"], group["update_proj_gap"], group["scale"])
    assert options == ((64, 100, 0.10) if name == "optim_args" else (128, 200, 0.25))
    assert trainer.optimizer.mode == ("deferred" if name == "layerwise" else "step")
    assert "projects 14 matrices" in caplog.text
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.05
    assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)
    assert not any(p._post_accumulate_grad_hooks for p in names["model"].parameters())


def test_layerwise_gives_the_weights_of_the_first_example(gemma, monkeypatch):
    for options, tolerance in (("max_steps=30, max_grad_norm=0", 0.0), ("max_steps=30", 1e-5)):
        changes = [("max_steps=100", options)]  # clipping rounds: norms are summed in another order
        first, layerwise = (run_script(text, gemma, monkeypatch, changes=changes) for text in (GALORE, LAYERWISE))
        assert (weights(first) - weights(layerwise)).abs().max() <= tolerance


def test_an_example_that_was_killed_goes_on_to_the_same_weights(gemma, monkeypatch):
    whole = run_script(LAYERWISE, gemma, monkeypatch, changes=SAVES)
    elsewhere = [*SAVES, ('"./test-galore"', '"./killed"')]
    with pytest.raises(Stop):
        run_script(LAYERWISE, gemma, monkeypatch, changes=elsewhere, callbacks=[StopAt(18)])
    resumed = run_script(LAYERWISE, gemma, monkeypatch, changes=elsewhere, resume=True)
    assert resumed["trainer"].state.global_step == 30
    assert torch.equal(weights(whole), weights(resumed))
    logs = [
        [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry] for names in (whole, resumed)
    ]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("optim", ["galore_adafactor", "galore_adamw_8bit"])
def test_the_other_names_of_the_documentation_run_too(gemma, monkeypatch, optim):
    for suffix in ("", "_layerwise"):
        changes = [('"galore_adamw"', f'"{optim}{suffix}"'), ("max_steps=100", "max_steps=5")]
        trainer = run_script(GALORE, gemma, monkeypatch, changes=changes)["trainer"]
        assert trainer.state.global_step == 5
        assert len(ranks(trainer.optimizer)) == 14
