"""What `fsdp` and `fsdp_config` say is done, or refused in words; which modules become units."""

import pytest
from torch import nn

from tr_dist.fsdp import Sharding
from tr_dist.fsdp.settings import choose_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Language(nn.Module):
    _no_split_modules = ("Block", "Elsewhere")

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def names(model, units):
    paths = {id(module): name for name, module in model.named_modules()}
    return [paths[id(unit)] for unit in units]


@pytest.mark.parametrize(
    ("options", "config", "expected"),
    [
        (["full_shard"], {}, {"strategy": "full_shard", "wrap": "NO_WRAP", "offload": False}),
        (["shard_grad_op", "offload"], {}, {"strategy": "shard_grad_op", "offload": True}),
        (["full_shard", "auto_wrap"], {}, {"wrap": "TRANSFORMER_BASED_WRAP", "layer_classes": ()}),
        (["full_shard"], {"min_num_params": 9}, {"wrap": "SIZE_BASED_WRAP", "min_num_params": 9}),
        (["full_shard"], {"transformer_layer_cls_to_wrap": ["Block"]}, {"layer_classes": ("Block",)}),
        (["full_shard"], {"reshard_after_forward": False}, {"strategy": "shard_grad_op"}),
        (["hybrid_shard"], {"reshard_after_forward": False}, {"strategy": "hybrid_shard_zero2"}),
        (["no_shard"], {"reshard_after_forward": False}, {"strategy": "no_shard"}),
        (
            [],
            {"sharding_strategy": "shard_grad_op", "cpu_offload": True},
            {"strategy": "shard_grad_op", "offload": True},
        ),
        (
            ["full_shard"],
            {"version": 2, "use_orig_params": True, "limit_all_gathers": True},
            {"strategy": "full_shard"},
        ),
        (["full_shard"], {"forward_prefetch": True, "backward_prefetch": "no_prefetch"}, {"forward_prefetch": True}),
        (["full_shard"], {"cpu_ram_efficient_loading": True}, {"rank0_loads": True}),
        (["full_shard"], {"backward_prefetch": "backward_post"}, {"backward_prefetch": "backward_post"}),
        (["hybrid_shard_zero2"], {"state_dict_type": "FULL_STATE_DICT"}, {"strategy": "hybrid_shard_zero2"}),
    ],
)
def test_words_and_keys_say_how_a_model_is_divided(options, config, expected):
    sharding = Sharding.from_config(options, config)
    assert {name: getattr(sharding, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        (["full_shard"], {"version": 1}, "version=1 is torch's former FSDP, .* leave it out or set version=2"),
        (["no_shard"], {"version": 1, "limit_all_gathers": False}, "version=1 is torch's former FSDP"),
        (["full_shard"], {"use_orig_params": False}, "use_orig_params=False is not supported: parameters always keep"),
        (["full_shard"], {"limit_all_gathers": False}, "limit_all_gathers=False is not supported"),
        (["full_shard"], {"xla": True}, "fsdp_config has xla, which is for TPUs; set strategy='xla'"),
        (["full_shard"], {"sharding_strategy": "no_shard"}, "'full_shard' and fsdp_config's .*'no_shard' differ"),
        (["shard_grad_op"], {"reshard_after_forward": True}, "'shard_grad_op' keeps parameters after the forward"),
        (["full_shard"], {"auto_wrap_policy": "NO_WRAP", "min_num_params": 5}, "leaves nothing for"),
        (["full_shard"], {"auto_wrap_policy": "SIZE_BASED_WRAP"}, "wrap by size needs min_num_params"),
        (
            ["full_shard"],
            {"cpu_ram_efficient_loading": True, "sync_module_states": False},
            "rank 0 alone hold the weights",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(options, config, message):
    with pytest.raises(ValueError, match=message):
        Sharding.from_config(options, config)


@pytest.mark.parametrize(
    ("strategy", "sizes", "expected"),
    [
        ("full_shard", {"dp_shard_size": 8}, ("full_shard", None, (1, 8))),
        ("full_shard", {"dp_replicate_size": 2, "dp_shard_size": 4}, ("hybrid_shard", 2, (2, 4))),
        ("shard_grad_op", {"dp_replicate_size": 4, "dp_shard_size": 2}, ("hybrid_shard_zero2", 4, (4, 2))),
        ("hybrid_shard", {"dp_shard_size": 8}, ("hybrid_shard", 1, (1, 8))),
        ("hybrid_shard", {}, ("hybrid_shard", None, (2, 4))),
        ("no_shard", {"dp_replicate_size": 8}, ("no_shard", None, (8, 1))),
    ],
)
def test_sizes_say_over_how_many_replicas_shards_are_repeated(strategy, sizes, expected):
    sharding = Sharding.from_config([strategy], {}, sizes)
    assert (sharding.strategy, sharding.replicas, sharding.mesh_shape(8, 4)) == expected


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="'no_shard' divides nothing, and parallelism_config's dp_shard_size=2"):
        Sharding.from_config(["no_shard"], {}, {"dp_shard_size": 2})
    with pytest.raises(ValueError, match="replicas=2 repeats the shards, and 'full_shard' does not"):
        Sharding(replicas=2)
    with pytest.raises(ValueError, match="8 processes are not a multiple of the 3 replicas"):
        Sharding(strategy="hybrid_shard", replicas=3).mesh_shape(8, 4)


@pytest.mark.parametrize("changes", [{"strategy": "zero3"}, {"wrap": "ALL"}, {"backward_prefetch": "later"}])
def test_a_value_that_is_not_known_is_refused_with_those_that_are(changes):
    with pytest.raises(ValueError, match="is not known; it is one of"):
        Sharding(**changes)


def test_units_are_the_layers_that_a_model_names():
    model = Language()
    assert names(model, choose_units(model, Sharding(wrap="TRANSFORMER_BASED_WRAP"))) == ["blocks.0", "blocks.1"]


def test_units_of_a_size_are_inner_modules_first_and_leave_tied_ones_together():
    model = Language()
    chosen = names(model, choose_units(model, Sharding(wrap="SIZE_BASED_WRAP", min_num_params=36)))
    assert chosen == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    chosen = names(model, choose_units(model, Sharding(wrap="SIZE_BASED_WRAP", min_num_params=50)))
    assert chosen == ["blocks.0", "blocks.1"]


def test_a_class_that_is_not_there_is_named_with_those_that_are():
    sharding = Sharding(wrap="TRANSFORMER_BASED_WRAP", layer_classes=("Blok",))
    with pytest.raises(ValueError, match="names Blok, and Language has no module of that class; it has Block, ModuleL"):
        choose_units(Language(), sharding)


def test_a_model_that_names_no_layers_is_told_what_to_set():
    with pytest.raises(ValueError, match=r"does not know the layers of Block.*transformer_layer_cls_to_wrap"):
        choose_units(Block(), Sharding(wrap="TRANSFORMER_BASED_WRAP"))
