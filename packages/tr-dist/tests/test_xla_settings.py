"""What is asked of XLA: read from the arguments, or refused in words, without torch_xla."""

import sys

import pytest
import torch

from tr_dist.xla import XLA, XlaSharding
from tr_dist.xla.library import _make, check_environment
from tr_dist.xla.replica_sharding import part_of_rows, read_settings

V2 = {"xla": True, "xla_fsdp_v2": True}


def test_the_keys_of_the_documentation_divide_a_model_over_replicas():
    given = {"xla": True, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}, "xla_fsdp_grad_ckpt": True}
    sharding = XlaSharding.from_config(["full_shard"], {**given, "transformer_layer_cls_to_wrap": ["Block"]})
    assert sharding is not None
    assert not sharding.over_devices
    assert sharding.recomputes
    assert (sharding.units.wrap, sharding.units.layer_classes) == ("TRANSFORMER_BASED_WRAP", ("Block",))
    assert read_settings(sharding.settings) == {"shard_param_on_dim_0": True, "compute_dtype": torch.bfloat16}


def test_the_second_version_divides_it_over_the_devices_of_a_process():
    sharding = XlaSharding.from_config(["full_shard"], {**V2, "min_num_params": 100, "version": 2})
    assert sharding is not None
    assert sharding.over_devices
    assert (sharding.units.wrap, sharding.units.min_num_params) == ("SIZE_BASED_WRAP", 100)


def test_without_keys_nothing_is_divided():
    assert XlaSharding.from_config([], {}) is None


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ([], {"xla_fsdp_v2": True}, "xla_fsdp_v2 has no effect without xla=True"),
        (["full_shard"], {}, "fsdp='full_shard' with strategy='xla' needs fsdp_config="),
        (["shard_grad_op"], V2, "fsdp='shard_grad_op' is not supported on XLA; use 'full_shard'"),
        (["full_shard", "offload"], V2, "fsdp='offload' is not supported on XLA"),
        (["full_shard"], {**V2, "cpu_offload": True}, "cpu_offload=True is not supported on XLA"),
        (
            ["full_shard"],
            {**V2, "state_dict_type": "SHARDED_STATE_DICT"},
            "state_dict_type='SHARDED_STATE_DICT' is not",
        ),
        (["full_shard"], {**V2, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}}, "leave one of the two out"),
        (["full_shard"], {**V2, "xla_fsdp_grad_ckpt": True}, "computes units again, and there are none"),
    ],
)
def test_what_xla_does_not_have_is_refused(options, config, message):
    with pytest.raises(ValueError, match=message):
        XlaSharding.from_config(options, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flatten_parameters": True}, "flatten_parameters=True .* take their shapes from"),
        ({"shard_param_on_dim_0": False}, "shard_param_on_dim_0=False take"),
        ({"compute_dtype": "float16"}, "compute_dtype='float16' is not known; it is 'float32' or 'bfloat16'"),
        ({"sharding_groups": [[0]]}, "sharding_groups cannot be set; it takes reshard_after_forward"),
    ],
)
def test_settings_that_cannot_be_had_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        read_settings(settings)


@pytest.mark.parametrize(
    ("environ", "use_cpu", "message"),
    [
        ({"USE_TORCH_XLA": "0"}, False, "USE_TORCH_XLA='0' contradict each other; unset the variable"),
        ({"USE_TORCH_XLA": ""}, True, None),
        ({"PJRT_DEVICE": "TPU"}, True, "use_cpu=True and PJRT_DEVICE='TPU' contradict"),
        ({"PJRT_DEVICE": "CPU"}, True, None),
        ({"WORLD_SIZE": "2"}, False, "in one of 2 processes .*torch_xla.launch.*strategy='ddp' or USE_TORCH_XLA=0"),
        ({"WORLD_SIZE": "1"}, False, None),
    ],
)
def test_the_environment_is_checked_before_torch_xla_is_loaded(environ, use_cpu, message):
    if message is None:
        check_environment(environ, use_cpu=use_cpu)
    else:
        with pytest.raises(ValueError, match=message):
            check_environment(environ, use_cpu=use_cpu)


def test_a_missing_torch_xla_is_named(monkeypatch):
    monkeypatch.delenv("USE_TORCH_XLA", raising=False)
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(ValueError, match=r"needs torch_xla, which cannot be imported .*pip install 'tr-dist\[xla\]'"):
        XLA()


def test_there_is_no_float16():
    with pytest.raises(ValueError, match=r"precision='fp16' is not supported on XLA.*use bf16=True"):
        XLA(precision="fp16")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_that_replicas_hold_are_those_of_the_whole(world_size):
    whole = torch.arange(14.0).reshape(7, 2)
    parts = [part_of_rows(whole, rank, world_size) for rank in range(world_size)]
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(torch.cat(parts)[:7], whole)


def test_random_states_of_the_device_are_bytes_like_those_of_others():
    class Model:
        state = 2**64 - 7

        def get_rng_state(self):
            return self.state

        def set_rng_state(self, state):
            self.state = state

    model = Model()
    module = _make(model)
    saved = module.get_rng_state()
    assert (saved.dtype, saved.shape) == (torch.uint8, (8,))
    module.manual_seed(3)
    assert model.state == 3
    module.set_rng_state(saved)
    assert model.state == 2**64 - 7
