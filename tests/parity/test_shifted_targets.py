"""Which labels are targets, for every causal class of transformers that can be built small: its own loss says it."""

import pytest
import torch
from parity_models import llama
from shared.causal_models import CONFIGS, KINDS, small_config, small_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tr_core import Trainer, TrainingArguments


def batch():
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(3, 60, (2, 8), generator=generator) for _ in range(2))
    labels[0, 3] = -100
    return {"input_ids": ids, "labels": labels}


def own_loss(model):
    """Return the loss that the model computes of labels, with what it would be with and without shifting."""
    inputs = batch()
    with torch.no_grad():
        outputs = model(**inputs)
    logits, labels = outputs.logits.float(), inputs["labels"]
    return outputs.loss.item(), cross_entropy(logits[:, :-1], labels[:, 1:]), cross_entropy(logits, labels)


def cross_entropy(logits, labels):
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)).item()


def counted(model, tmp_path):
    """Return how many targets a Trainer counts in two rows of eight labels, one of them -100."""
    trainer = Trainer(model, arguments(tmp_path), train_dataset=[{"input_ids": torch.arange(8)}])
    return int(trainer._get_num_items_in_batch([batch()], torch.device("cpu")))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(KINDS))
def test_targets_are_shifted_where_the_models_own_loss_shifts_them(name, tmp_path):
    try:
        model = small_model(KINDS[name], CONFIGS[name])
        loss, shifted, unshifted = own_loss(model)
    except Exception as error:  # the sizes here fit most models, not all
        pytest.skip(f"cannot be built and run small: {type(error).__name__}: {str(error)[:80]}")
    does_shift = abs(loss - shifted) < 1e-4
    if not does_shift and abs(loss - unshifted) >= 1e-4:
        pytest.skip("its own loss is not a plain cross entropy")
    assert counted(model, tmp_path) == (13 if does_shift else 15)


def test_most_causal_classes_can_be_built_small():
    """What is skipped above is not proof: there are not many such."""
    built = 0
    for name in sorted(KINDS)[::9]:
        try:
            small_config(KINDS[name], CONFIGS[name])
        except Exception:
            continue
        built += 1
    assert built >= len(sorted(KINDS)[::9]) * 0.8


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=17, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def rows(number, length=10):
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(number):
        ids = torch.randint(1, 17, (length,), generator=generator)
        labels = ids.clone()
        labels[: index * 2] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(path, **changes):
    return TrainingArguments(
        **{"output_dir": str(path), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        | changes
    )


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_evaluation_loss_and_perplexity_are_those_of_the_next_token(tmp_path, build, epsilon):
    model, data = build().eval(), rows(4)
    trainer = Trainer(
        model,
        # Perplexity is of the labels as they are.
        arguments(tmp_path, label_smoothing_factor=epsilon, eval_perplexity=not epsilon, per_device_eval_batch_size=2),
        eval_dataset=data,
    )
    found = trainer.evaluate()
    labels = torch.stack([row["labels"] for row in data])[:, 1:]
    with torch.no_grad():
        logits = model(torch.stack([row["input_ids"] for row in data])).logits[:, :-1].float()
    wanted = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=epsilon).item()
    assert found["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    if not epsilon:
        assert found["eval_perplexity"] == pytest.approx(torch.tensor(wanted).exp().item(), rel=1e-5)


def test_a_smoothed_gpt2_learns_the_next_token_and_not_its_input(tmp_path):
    model, data = (
        gpt2(),
        [{"input_ids": (ids := torch.arange(start, start + 10) % 17), "labels": ids} for start in (0, 6, 11)],
    )
    trainer = Trainer(
        model,
        arguments(tmp_path, label_smoothing_factor=0.1, num_train_epochs=60, learning_rate=0.03, logging_steps=500),
        train_dataset=data,
    )
    trainer.train()
    ids = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        guessed = model.eval()(ids).logits.argmax(-1)
    assert (guessed[:, :-1] == ids[:, 1:]).float().mean() > 0.9
