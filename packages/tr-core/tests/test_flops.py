"""Estimate the operations of models, and look up the peaks of devices."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_core.flops import look_at, num_positions, num_targets, peak_flops, peaks_of


class Language(nn.Module):
    """A table of embeddings, two layers and an output layer, which may be tied to the table."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def freeze(*modules):
    for module in modules:
        module.requires_grad_(False)


def test_all_trainable_weights_count_six_and_embeddings_nothing():
    assert look_at(Language()).per_position == 6 * (24 + 24 + 40)
    assert look_at(Language(tied=True)).per_position == 6 * (24 + 24 + 40)


@pytest.mark.parametrize(
    ("frozen", "operations"),
    [
        (["second"], 6 * 24 + 4 * 24 + 6 * 40),  # behind a trainable one it passes a gradient on
        # The first trainable layer needs its own gradient, and none for its input.
        (["embedding", "first"], 2 * 24 + 4 * 24 + 6 * 40),
    ],
)
def test_frozen_weights_count_less_and_least_with_nothing_trainable_before_them(frozen, operations):
    model = Language()
    freeze(*map(model.get_submodule, frozen))
    assert look_at(model).per_position == operations


def test_adapters_on_frozen_weights_count_for_what_they_do():
    model = Language()
    freeze(model)
    model.first.adapter = nn.Linear(4, 1, bias=False)
    # The frozen layers behind the adapter pass its gradient back.
    assert look_at(model).per_position == 2 * 24 + 4 * 4 + 4 * 24 + 4 * 40


def test_of_a_mixture_of_experts_those_count_that_a_token_goes_to():
    model = Language()
    model.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(8))
    model.shared_experts_gate = nn.Linear(4, 1, bias=False)
    model.config = SimpleNamespace(num_experts_per_tok=2, num_local_experts=8)
    assert look_at(model).per_position == 6 * (24 + 24 + 40 + 2 * 16 + 4)


class Translator(nn.Module):
    """An encoder, and a decoder with attention to it."""

    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True)
        self.shared = nn.Embedding(10, 4)
        self.encoder = nn.Sequential(nn.Linear(4, 4, bias=False))
        self.decoder = nn.Sequential(nn.Linear(4, 6, bias=False))
        self.decoder.encoder_attn = nn.ModuleDict({f"{n}_proj": nn.Linear(4, 4, bias=False) for n in "qkv"})
        self.head = nn.Linear(6, 10, bias=False)

    def get_encoder(self):
        return self.encoder


def test_an_encoder_counts_for_the_input_and_a_decoder_for_its_targets():
    facts = look_at(Translator())
    assert facts.per_position == 6 * (16 + 2 * 16)  # the decoder's keys and values are of the encoder's output
    assert facts.per_target == 6 * (24 + 16 + 60)
    model = Translator()
    model.main_input_name = "input_features"  # sounds
    assert look_at(model)[:2] == (None, 0.0)


def test_targets_are_those_of_the_decoder_s_input_or_of_the_input_itself():
    ids, longer = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    assert num_targets({"input_ids": ids, "labels": longer}, "input_ids") == 10
    assert num_targets({"input_ids": ids, "labels": longer, "decoder_input_ids": ids}, "input_ids") == 6
    assert num_targets({"input_ids": ids, "labels": torch.ones(2, dtype=torch.int64)}, "input_ids") == 6


@pytest.mark.parametrize("config", [{"is_encoder_decoder": True}, {"vision_config": object()}])
def test_there_is_no_estimate_where_parts_see_different_positions(config):
    model = Language()
    model.config = SimpleNamespace(**config)
    assert look_at(model).per_position is None


def test_there_is_no_estimate_for_weights_in_buffers_and_one_for_packed_and_sharded_ones():
    model = Language()
    model.second.register_buffer("qweight", torch.zeros(3, dtype=torch.int32))
    assert look_at(model).per_position is None
    model = Language()
    model.first.weight = nn.Parameter(torch.zeros(12, 1, dtype=torch.uint8), requires_grad=False)
    model.first.weight.quant_state = SimpleNamespace(shape=(6, 4))
    model.second.weight.ds_numel = 24
    model.second.weight.data = torch.empty(0)
    assert look_at(model).per_position == 4 * 24 + 6 * 24 + 6 * 40


def test_the_type_is_that_of_most_elements():
    model = Language()
    model.head.to(torch.bfloat16)
    model.second.to(torch.bfloat16)
    assert look_at(model).dtype is torch.bfloat16
    assert look_at(model).devices == {torch.device("cpu")}


def test_positions_are_those_of_integers_or_of_embedded_vectors():
    ids = torch.ones(2, 3, dtype=torch.int64)
    assert num_positions({"input_ids": ids, "labels": ids}, "input_ids") == 6
    assert num_positions({"inputs_embeds": torch.ones(2, 5, 7)}, "input_ids") == 10
    assert num_positions({"pixel_values": torch.ones(2, 5, 7)}, "pixel_values") == 0
    assert num_positions([ids], "input_ids") == 0


@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", None),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A40-48Q", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_devices_are_found_by_their_whole_name(name, bfloat16):
    assert peaks_of(name).get("bfloat16") == bfloat16


def test_devices_without_bfloat16_have_a_peak_of_float16():
    assert peaks_of("Tesla T4")["float16"] == 65
    assert peaks_of("Tesla V100-SXM2-32GB")["float16"] == 125


def test_no_device_is_faster_in_a_wider_type():
    for name in ("B200", "H200", "H100 PCIe", "A100-SXM4-40GB", "L40S", "A10", "RTX 3090", "RTX 5090"):
        peaks = peaks_of(name)
        assert peaks["bfloat16"] > peaks["tf32"] >= peaks["float32"], name


def test_what_a_user_gives_wins_then_the_environment(monkeypatch):
    cpu = torch.device("cpu")
    assert peak_flops(cpu, torch.float32) is None
    monkeypatch.setenv("TR_PEAK_FLOPS", "5e12")
    assert peak_flops(cpu, torch.float32) == 5e12
    assert peak_flops(cpu, torch.float32, 2.0) == 2.0


@pytest.mark.parametrize("text", ["fast", "-1", "inf", "nan"])
def test_a_peak_in_the_environment_must_be_a_positive_number(monkeypatch, text):
    monkeypatch.setenv("TR_PEAK_FLOPS", text)
    with pytest.raises(ValueError, match=r"not a positive number; .* one device .* TR_PEAK_FLOPS=989.5e12"):
        peak_flops(torch.device("cpu"), torch.float32)


def test_a_tpu_is_known_by_its_type(monkeypatch):
    device = SimpleNamespace(type="xla")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    assert peak_flops(device, torch.bfloat16) is None
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    assert peak_flops(device, torch.bfloat16) == 197e12
    assert peak_flops(device, torch.float32) is None


def test_float32_has_the_peak_of_tf32_where_torch_may_use_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    device = torch.device("cuda", 0)
    for precision, peak in (("highest", 19.5e12), ("high", 156e12)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert peak_flops(device, torch.float32) == peak
    assert peak_flops(device, torch.bfloat16) == 312e12
