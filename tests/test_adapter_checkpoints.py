"""Checkpoints of models with LoRA adapters: what training changes, in PEFT's own format, and nothing else."""

import json
import shutil

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tr_all import Trainer, TrainingArguments
from tr_core.testing import fingerprint

# PEFT asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ROWS = torch.randint(0, 50, (24, 8), generator=torch.Generator().manual_seed(0))


def make_base(folder, seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=50,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        **{**sizes, **options},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path):
    """Return a folder with a small pretrained model whose embedding and head are one."""
    return make_base(tmp_path / "base")


def adapted(base, **options):
    torch.manual_seed(1)
    given = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**{**given, **options}))


def norms_trained(base):
    """A model whose last norm is trained beside the adapter."""
    model = adapted(base)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    return model


def norm_saved(base):
    """A model whose last norm is trained whole, as PEFT's `modules_to_save` has it."""
    return adapted(base, modules_to_save=["model.norm"])


def of_two(base):
    """A model with a second adapter, which is not the active one."""
    model = adapted(base)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    return model


def decomposed(base):
    """A model with DoRA, some of whose weights PEFT saves under other names."""
    return adapted(base, use_dora=True)


def make(model, folder, **changes):
    options = {
        "num_train_epochs": 2,
        "save_strategy": "epoch",
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
    }
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    args = TrainingArguments(str(folder), **{**options, **changes})
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8])


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", [adapted, norms_trained, norm_saved, of_two, decomposed])
def test_a_run_resumed_from_an_adapters_checkpoint_ends_with_the_same_bits(base, tmp_path, kind):
    whole = make(kind(base), tmp_path / "out")
    whole.train()
    shutil.rmtree(tmp_path / "out/checkpoint-12")
    resumed = make(kind(base), tmp_path / "out")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 12
    assert same(weights(whole.model), weights(resumed.model))


@pytest.mark.parametrize("kind", [adapted, norm_saved])
def test_a_checkpoint_is_what_from_pretrained_of_peft_loads(base, tmp_path, kind):
    trainer = make(kind(base), tmp_path / "out")
    trainer.train()
    folder = tmp_path / "out/checkpoint-12"
    loaded = [PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))]
    if kind is adapted:  # then the folder is enough: it names its base
        loaded.append(AutoModelForCausalLM.from_pretrained(folder))
        fresh = kind(base).state_dict()
        changed = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, fresh[name])}
        assert changed == {name for name in fresh if ".lora_" in name}
    with torch.no_grad():
        for model in loaded:
            assert torch.equal(model.eval()(ROWS).logits, trainer.model.eval()(ROWS).logits)
    assert json.loads((folder / "adapter_config.json").read_text())["inference_mode"] is True


def test_a_checkpoint_holds_no_frozen_weight(base, tmp_path):
    trainer = make(norms_trained(base), tmp_path / "out")
    trainer.train()
    folder = tmp_path / "out/checkpoint-12"
    adapter = {n.replace(".default", "") for n, p in trainer.model.named_parameters() if "lora_" in n}
    assert load_file(folder / "adapter_model.safetensors").keys() == adapter
    assert list(load_file(folder / "unfrozen.safetensors")) == ["base_model.model.model.norm.weight"]
    assert not (folder / "model.safetensors").exists()
    # What PEFT writes at the end of a run is the same.
    trainer.save_model()
    assert same(load_file(folder / "adapter_model.safetensors"), load_file(tmp_path / "out/adapter_model.safetensors"))
    at_end, in_folder = (json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path / "out", folder))
    assert {**at_end, "target_modules": None} == {**in_folder, "target_modules": None}  # a set, in any order


def test_another_base_under_the_adapter_is_refused(base, tmp_path):
    make(adapted(base), tmp_path / "out").train()
    other = make_base(tmp_path / "other", seed=5)
    with pytest.raises(ValueError, match="frozen weights under the adapter are not those .*with other values"):
        make(adapted(other), tmp_path / "out").train(resume_from_checkpoint=True)
    narrow = make(adapted(base).to(torch.bfloat16), tmp_path / "out", num_train_epochs=3)
    with pytest.raises(ValueError, match=r"of float32 then, .* of bfloat16 now"):
        narrow.train(resume_from_checkpoint=True)


def test_another_adapter_is_refused(base, tmp_path):
    make(adapted(base), tmp_path / "out").train()
    with pytest.raises(ValueError, match="optimizer state|adapter differs from the one that was saved"):
        make(adapted(base, target_modules=["q_proj"]), tmp_path / "out").train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="size mismatch|shape"):
        make(adapted(base, r=2), tmp_path / "out").train(resume_from_checkpoint=True)


def test_one_changed_bit_of_one_frozen_weight_shows(base):
    model = adapted(base)
    before = fingerprint(model)
    assert fingerprint(adapted(base)) == before
    weight = model.get_base_model().model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight.view(torch.int32)[3, 5] ^= 1
    assert fingerprint(model) != before
    assert fingerprint(torch.nn.Linear(2, 2)) is None


def test_the_best_adapter_is_loaded_at_the_end(base, tmp_path):
    scores = iter([1.0, 2.0, 3.0])
    trainer = make(
        adapted(base),
        tmp_path / "out",
        num_train_epochs=3,
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=False,
    )
    trainer.compute_metrics = lambda prediction: {"score": next(scores)}
    trainer.train()
    best = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "out/checkpoint-6"))
    assert same({k: v for k, v in weights(best).items()}, weights(trainer.model))


def test_the_model_alone_is_the_adapter_alone(base, tmp_path):
    make(adapted(base), tmp_path / "out", save_only_model=True).train()
    names = {path.name for path in (tmp_path / "out/checkpoint-12").glob("*.safetensors")}
    assert names == {"adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("part", "named"), [("adapter_model", "adapter;"), ("unfrozen", "weights that are trained beside the adapter;")]
)
def test_a_checkpoint_that_lacks_weights_which_are_trained_is_refused(base, tmp_path, part, named):
    from tr_ckpt import Checkpointer

    class Kept:
        def __init__(self, state):
            self.state = state

        def state_dict(self):
            return self.state

    make(norms_trained(base), tmp_path / "out").train()
    source = Checkpointer(tmp_path / "out")
    names = ["adapter_model", "unfrozen", "optimizer", "scheduler", "rng", "run", "callbacks", "trainer_state"]
    source.restore({}, tmp_path / "out/checkpoint-6", only_read=names)
    parts = {name: Kept(state) for name, state in source.restored.states.items() if name != part}
    Checkpointer(tmp_path / "lacking").save(6, parts)
    with pytest.raises(ValueError, match=f"the checkpoint of step 6 holds no {named}"):
        make(norms_trained(base), tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "lacking"))


def test_a_frozen_model_without_an_adapter_is_saved_whole(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    make(model, tmp_path / "out", num_train_epochs=1).train()
    saved = load_file(tmp_path / "out/checkpoint-6/model.safetensors")
    assert "model.layers.0.mlp.down_proj.weight" in saved


def replaced(base):
    """A model whose state is replaced by its adapter, as alpaca-lora's script does."""
    model = adapted(base)
    old = model.state_dict
    model.state_dict = (lambda self, *_, **__: get_peft_model_state_dict(self, old())).__get__(model, type(model))
    return model


def test_a_model_whose_state_a_script_replaces_by_the_adapter_is_resumed_and_saved(base, tmp_path):
    def make(folder, **options):
        args = TrainingArguments(
            str(tmp_path / folder),
            per_device_train_batch_size=4,
            learning_rate=0.05,
            logging_steps=1,
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            num_train_epochs=1,
            **options,
        )
        rows = [{"input_ids": row, "labels": row} for row in ROWS]
        return Trainer(replaced(base), args, train_dataset=rows, eval_dataset=rows[:4])

    alone = make("alone")
    alone.train()
    assert (tmp_path / "alone" / "checkpoint-4" / "adapter_model.safetensors").exists()
    shutil.copytree(tmp_path / "alone" / "checkpoint-4", tmp_path / "again" / "checkpoint-4")
    again = make("again")
    again.train(resume_from_checkpoint=True)
    theirs = dict(again.model.named_parameters())
    assert all(torch.equal(value, theirs[name]) for name, value in alone.model.named_parameters())
    again.save_model(str(tmp_path / "saved"))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "saved")
    assert any("lora_B" in name and value.abs().sum() > 0 for name, value in loaded.named_parameters())
    for name, value in loaded.named_parameters():
        assert torch.equal(value, theirs[name])
