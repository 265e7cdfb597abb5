"""The backends that the scenarios run on, by name, and the arguments that choose each of their variants."""

_BY_CLASS = {"transformer_layer_cls_to_wrap": ["Sequential"]}
_DIVIDED = {"stage": 3, "stage3_param_persistence_threshold": 0}  # or all parameters of small models stay whole
_IN_HOST_MEMORY = {"device": "cpu"}

VARIANTS = {
    "ddp": {"ddp": {"strategy": "ddp"}},
    "accelerate": {"accelerate": {"strategy": "accelerate"}},
    "fsdp": {
        "full_shard": {"fsdp": "full_shard"},
        "units": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, **_BY_CLASS}},
        "shard_grad_op": {"fsdp": "shard_grad_op", "fsdp_config": {"min_num_params": 60}},
        "no_shard": {"fsdp": "no_shard"},
        "offload": {"fsdp": "full_shard offload", "fsdp_config": {"fsdp_state_dict_type": "FULL_STATE_DICT"}},
    },
    "deepspeed": {
        "zero_0": {"deepspeed": {"zero_optimization": {"stage": 0}}},
        "zero_1": {"deepspeed": {"zero_optimization": {"stage": 1}}},
        "zero_2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
        "zero_2_offload": {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": _IN_HOST_MEMORY}}},
        "zero_3": {"deepspeed": {"zero_optimization": _DIVIDED}},
        "zero_3_offload": {
            "deepspeed": {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": _IN_HOST_MEMORY,
                    "offload_param": _IN_HOST_MEMORY,
                    "stage3_gather_16bit_weights_on_model_save": True,
                }
            }
        },
    },
    "xla": {},  # its devices are those of one process: test_xla.py has its scenarios
}
# What is run with all other tests; `nox -s backend` runs every variant of one backend.
USUAL = ("ddp", "units", "offload")


def chosen(backends):
    """Return (name, options) of all variants of some backends; without any, the usual ones."""
    variants = [(name, options) for b in backends or VARIANTS for name, options in VARIANTS[b].items()]
    return variants if backends else [(name, options) for name, options in variants if name in USUAL]
