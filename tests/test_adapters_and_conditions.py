"""Compiled and checkpointed runs of models of transformers and of PEFT's adapters: names, files, and what is left."""

import json

import pytest
import torch
from shared.results import distance, nudged

from tr_core import Trainer, TrainingArguments

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [
    # PEFT asks transformers by an old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # torch's compiler hides this one from users, but not from pytest.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def adapted():
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


def rows(number):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 17, (number, 8), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def train(folder, model, **options):
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        logging_steps=1,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        **{"save_strategy": "no", **options},
    )
    trainer = Trainer(model, args, train_dataset=rows(12), eval_dataset=rows(4))
    trainer.train()
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def text_of(folder):
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


CONDITIONS = {
    "compiled": {"torch_compile_backend": "eager"},
    "checkpointed": {"activation_checkpointing": True},
    "compiled and checkpointed": {"torch_compile_backend": "aot_eager", "activation_checkpointing": True},
}


@pytest.mark.parametrize(
    ("make", "condition"),
    [
        (llama, "compiled"),
        (llama, "checkpointed"),
        (adapted, "checkpointed"),
        pytest.param(adapted, "compiled and checkpointed", marks=pytest.mark.slow),
    ],
)
def test_losses_weights_and_files_are_those_of_a_plain_run(tmp_path, make, condition):
    plain = train(tmp_path / "plain", make())
    trainer = train(tmp_path / "run", make(), save_strategy="epoch", **CONDITIONS[condition])
    tolerance = 0.0
    if condition != "checkpointed":  # compiled, a gradient may be added up in another order
        spread = distance(train(tmp_path / "nudged", nudged(make())), plain)
        tolerance = max(1e-6, 10 * spread)
    assert losses(trainer) == pytest.approx(losses(plain), rel=tolerance)
    mine, theirs = trainer.model.state_dict(), plain.model.state_dict()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)
    trainer.save_model(tmp_path / "run" / "saved")
    plain.save_model(tmp_path / "plain" / "saved")
    assert "_orig_mod" not in text_of(tmp_path / "run")
    names = [sorted(path.name for path in (tmp_path / run / "saved").iterdir()) for run in ("run", "plain")]
    assert names[0] == names[1]
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "run" / "saved") if make is adapted else None
    loaded = loaded or transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "saved")
    with torch.no_grad():
        batch = torch.stack([row["input_ids"] for row in rows(4)])
        trainer.model.eval()
        assert torch.equal(loaded.eval()(batch).logits, trainer.model(batch).logits)


def test_an_adapted_model_is_not_checkpointed_any_more_afterwards(tmp_path):
    model = adapted()
    train(tmp_path, model, activation_checkpointing=True)
    assert not model.is_activation_checkpointing
    assert not any(module._forward_hooks for module in model.modules())


def test_checkpointing_that_the_user_switched_on_stays_on(tmp_path):
    model = llama()
    model.activation_checkpointing_enable()
    own = [module._gradient_checkpointing_func for module in model.model.layers]
    hooks = len(model.model.embed_tokens._forward_hooks)
    train(tmp_path, model, activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})
    assert [module.gradient_checkpointing for module in model.model.layers] == [True] * 3
    assert [module._gradient_checkpointing_func for module in model.model.layers] == own
    assert len(model.model.embed_tokens._forward_hooks) == hooks


def test_checkpoints_have_the_models_own_use_cache(tmp_path):
    train(tmp_path, llama(), save_strategy="epoch")
    (config,) = tmp_path.glob("checkpoint-*/config.json")
    assert json.loads(config.read_text())["use_cache"] is True


def test_liger_kernels_know_no_plain_module(tmp_path):
    """The package itself, where it is installed."""
    pytest.importorskip("liger_kernel.transformers")
    with pytest.raises(ValueError, match="liger-kernel has no kernels for Linear"):
        train(tmp_path, torch.nn.Linear(2, 2), use_liger_kernel=True)


def test_a_generation_of_a_compiled_run_is_not_compiled(tmp_path):
    """Every token has another shape, and each would be compiled anew."""
    from tr_core import Seq2SeqTrainer, Seq2SeqTrainingArguments

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=17, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    model, calls = transformers.T5ForConditionalGeneration(config), []
    model.register_forward_hook(lambda module, args, output: calls.append(torch.compiler.is_compiling()))
    options = {"predict_with_generate": True, "generation_max_length": 6, "torch_compile_backend": "eager"}
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, **options)
    trainer = Seq2SeqTrainer(model, args, train_dataset=rows(4))
    generated = trainer.predict([{"input_ids": row["input_ids"]} for row in rows(4)]).predictions
    assert generated.shape == (4, 6)
    assert calls == [False] * 5
    assert model._compiled_call_impl is None
