"""Habits with models of transformers: generating in a run, caches, checkpointing, new tokens, adapters."""

import pytest
import torch
from habit_parts import at_step, logged, when
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

RATE = 0.05
# Former names of transformers, which the tests use as users do, and peft within.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


def language_model(dropout=0.0, **options):
    torch.manual_seed(0)
    small = {"vocab_size": 11, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    dropouts = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**small, **dropouts, **options, bos_token_id=0, eos_token_id=0, pad_token_id=0))


def texts(number=8, largest=11):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, largest, (number, 6), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def by_hand(model, data, rate=RATE):
    """Train with the mean cross-entropy of each next token, two texts a step; return the losses."""
    losses = []
    for start in range(0, len(data), 2):
        ids = torch.stack([row["input_ids"] for row in data[start : start + 2]])
        logits = model(input_ids=ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    return losses


@pytest.fixture
def trains(make_trainer):
    return lambda **changes: make_trainer(**{"train_dataset": texts(), "learning_rate": RATE, **changes})


def test_texts_generated_in_a_run_change_nothing_of_it(trains):
    made = []

    def generate(model, **_):
        model.eval()
        with torch.no_grad():
            made.append(model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).tolist())
        model.train()

    trainer = trains(model=language_model(), callbacks=[when(on_log=generate)])
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(language_model(), texts()), rel=1e-5)
    assert len(made) == 5


def test_a_cache_that_the_user_switched_on_is_on_again_after_the_run(trains):
    model, seen = language_model(), []
    model.config.use_cache = True
    trains(model=model, callbacks=[when(on_step_end=lambda model, **_: seen.append(model.config.use_cache))]).train()
    assert seen == [False] * 4
    assert model.config.use_cache is True


def test_checkpointing_that_the_user_switched_on_gives_the_same_numbers(trains):
    model, calls = language_model(), []
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for block in model.transformer.h:
        block.attn.register_forward_hook(lambda *_: calls.append(1))
    trainer = trains(model=model)
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(language_model(), texts()), rel=1e-5)
    assert len(calls) == 4 * 2 * 2  # each layer twice a step


def test_new_tokens_added_after_construction_are_trained(trains):
    model, other = language_model(), language_model()
    trainer = trains(model=model, train_dataset=texts(largest=13))
    for each in (model, other):
        torch.manual_seed(5)
        each.resize_token_embeddings(13, mean_resizing=False)
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, texts(largest=13)), rel=1e-5)
    torch.testing.assert_close(model.transformer.wte.weight, other.transformer.wte.weight)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_weights_untied_after_construction_are_trained_apart(trains):
    model, other = language_model(), language_model()
    trainer = trains(model=model)
    for each in (model, other):
        each.config.tie_word_embeddings = False
        each.lm_head.weight = nn.Parameter(each.transformer.wte.weight.detach().clone())
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, texts()), rel=1e-5)
    torch.testing.assert_close(model.lm_head.weight, other.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)


def adapter(model):
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=2, target_modules=["c_attn"], fan_in_fan_out=True))


def test_an_adapter_set_on_the_trainer_is_what_is_trained_and_saved(trains, tmp_path):
    trainer, other = trains(model=language_model()), adapter(language_model())
    trainer.model = adapter(trainer.model)
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    assert logged(trainer) == pytest.approx(by_hand(other, texts()), rel=1e-5)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    loaded = PeftModel.from_pretrained(language_model(), tmp_path / "adapter")
    ids = texts()[0]["input_ids"][None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, other.eval()(input_ids=ids).logits)


def test_an_adapter_put_into_the_model_after_construction_leaves_the_rest_as_it_was(trains):
    trainer, before = trains(model=language_model()), language_model()
    adapter(trainer.model)
    trainer.train()
    weights = {name.replace("base_layer.", ""): tensor for name, tensor in trainer.model.state_dict().items()}
    changed = [name for name in weights if "lora_" in name]
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.state_dict().items())
    assert any(weights[name].abs().sum() > 0 for name in changed if "lora_B" in name)


def test_a_layer_norm_kept_in_full_precision_by_a_hook_trains(trains):
    model = language_model().to(torch.bfloat16)
    model.transformer.ln_f.float()
    model.transformer.ln_f.register_forward_pre_hook(lambda module, given: (given[0].float(),))
    model.transformer.ln_f.register_forward_hook(lambda module, given, output: output.to(torch.bfloat16))
    trainer = trains(model=model)
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(language_model(), texts()), rel=2e-2)


def test_weights_of_the_best_step_loaded_by_hand_are_those_evaluated(trains, tmp_path):
    trainer = trains(model=language_model(), eval_dataset=texts(2))
    found = []
    trainer.add_callback(at_step(2, lambda **_: trainer.save_model(tmp_path / "best")))
    trainer.add_callback(at_step(2, lambda **_: found.append(trainer.evaluate()["eval_loss"])))
    trainer.train()
    trainer.model.load_state_dict(GPT2LMHeadModel.from_pretrained(tmp_path / "best").state_dict())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(found[0])
    assert found[0] != pytest.approx(logged(trainer)[-1])
