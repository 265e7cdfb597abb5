import pytest
import torch
from torch import nn

from tr_optim import decay_parameter_names, parameter_groups


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.attention = nn.Linear(3, 3)
        self.first_norm = nn.RMSNorm(3)
        self.scaling = nn.LayerNorm(3)
        self.normal = nn.Linear(3, 3)
        self.out = nn.Linear(3, 4, bias=False)
        self.out.weight = self.embed.weight


def _names(model, parameters):
    by_identity = {id(p): name for name, p in model.named_parameters()}
    return [by_identity[id(p)] for p in parameters]


def test_biases_and_norms_do_not_decay_and_tied_parameters_count_once():
    assert decay_parameter_names(Block()) == ["embed.weight", "attention.weight", "normal.weight"]


@pytest.mark.parametrize(
    "name", ["bias", "my_biases", "layernorm_1", "LayerNorm", "rmsnorm", "a.norm.b", "norm", "q_norm", "q_norm.w"]
)
def test_names_that_tell_a_norm_or_a_bias_do_not_decay(name):
    model = nn.Module()
    inner = model
    *path, last = name.split(".")
    for part in path:
        inner.add_module(part, nn.Module())
        inner = getattr(inner, part)
    inner.register_parameter(last, nn.Parameter(torch.ones(2)))
    model.register_parameter("normalised", nn.Parameter(torch.ones(2)))
    assert decay_parameter_names(model) == ["normalised"]


def test_norms_that_names_do_not_tell_can_be_named_by_class():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    assert decay_parameter_names(model) == ["0.weight", "1.weight"]
    assert decay_parameter_names(model, norm_types=(nn.LayerNorm, nn.BatchNorm2d)) == ["0.weight"]
    assert len(parameter_groups(model, 0.1, norm_types=(nn.BatchNorm2d,))[0]["params"]) == 1


def _architectures():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = {**small, "vocab_size": 50}
    return {
        "bert": transformers.BertConfig(**text),
        "roberta": transformers.RobertaConfig(**text),
        "gpt2": transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50),
        "llama": transformers.LlamaConfig(**text, num_key_value_heads=1),
        "gemma2": transformers.Gemma2Config(**text, num_key_value_heads=1, head_dim=8),
        "qwen3": transformers.Qwen3Config(**text, num_key_value_heads=1, head_dim=8),
        "t5": transformers.T5Config(d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2, vocab_size=50),
        "deberta": transformers.DebertaV2Config(**text),
        "vit": transformers.ViTConfig(**small, image_size=8, patch_size=4),
        "resnet": transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        "wav2vec2": transformers.Wav2Vec2Config(**text, conv_dim=(8,), conv_stride=(2,), conv_kernel=(3,)),
        "mamba": transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=50, state_size=4),
    }


ARCHITECTURES = (
    *("bert", "roberta", "gpt2", "llama", "gemma2", "qwen3", "t5", "deberta", "vit", "resnet", "wav2vec2", "mamba"),
)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")  # of the architectures, which are not what is tested
def test_the_rule_is_that_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoModelForCausalLM if name in ("gpt2", "llama", "gemma2", "qwen3", "mamba") else None
    model = (auto or transformers.AutoModel).from_config(_architectures()[name])
    reference = set(transformers.Trainer.get_decay_parameter_names(None, model))
    everything = [parameter for parameter, _ in model.named_parameters()]
    expected = [parameter for parameter in everything if parameter in reference]
    assert decay_parameter_names(model) == expected
    assert 0 < len(expected) < len(everything)


def test_groups_hold_every_trainable_parameter_once_in_order():
    model = Block()
    model.attention.weight.requires_grad_(False)
    decay, other = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    assert _names(model, decay["params"]) == ["embed.weight", "normal.weight"]
    assert _names(model, other["params"]) == [
        *("attention.bias", "first_norm.weight", "scaling.weight", "scaling.bias", "normal.bias"),
    ]
    torch.optim.AdamW([decay, other], lr=1e-3)


def test_no_weight_decay_at_all_may_be_asked_for():
    groups = parameter_groups(nn.Linear(2, 2), weight_decay=0.0)
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]


def test_both_groups_are_there_even_if_one_is_empty():
    assert [len(group["params"]) for group in parameter_groups(nn.Linear(2, 2, bias=False), 0.1)] == [1, 0]


def test_learning_rates_by_pattern_make_groups_of_their_own():
    model = Block()
    groups = parameter_groups(model, 0.1, lr_by_pattern={r"^attention\.": 1e-4, "weight": 1e-5})
    described = [(_names(model, g["params"]), g["weight_decay"], g.get("lr")) for g in groups]
    assert described == [
        ([], 0.1, None),
        (["scaling.bias", "normal.bias"], 0.0, None),
        (["attention.weight"], 0.1, 1e-4),
        (["attention.bias"], 0.0, 1e-4),
        (["embed.weight", "normal.weight"], 0.1, 1e-5),
        (["first_norm.weight", "scaling.weight"], 0.0, 1e-5),
    ]


@pytest.mark.parametrize(
    ("decay", "rates", "message"),
    [
        (-0.1, None, "weight_decay=-0.1 must not be negative"),
        (0.1, {"out": -1.0}, r"lr_by_pattern\['out'\]=-1 must not be negative"),
        (0.1, {"head": 1e-4}, "'head' matches no trainable parameter; trainable are embed.weight, .* and 3 more"),
        (0.1, {"attention": 1e-4, "attention.bias": 1e-5}, "'attention.bias' matches only parameters that an earlier"),
    ],
)
def test_groups_that_cannot_be_made_are_refused(decay, rates, message):
    with pytest.raises(ValueError, match=message):
        parameter_groups(Block(), decay, lr_by_pattern=rates)


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="none of the 2 parameters of Linear is trainable"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1)
