"""The backends that the scenarios run on, by name, and the arguments that choose each of their variants."""

import torch

from tr_dist.testing import run_ranks

_BY_CLASS = {"transformer_layer_cls_to_wrap": ["Sequential"]}
_DIVIDED = {"stage": 3, "stage3_param_persistence_threshold": 0}  # or all parameters of small models stay whole
_IN_HOST_MEMORY = {"device": "cpu"}
_OF_NETWORK = {"layers.0": "colwise", "layers.2": "rowwise"}  # other models have other plans

BACKENDS = {
    "cpu": {"cpu": {"strategy": "single"}},
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
    "mesh": {  # two processes compute each sample
        "tp": {"parallelism_config": "tp=2", "tp_plan": _OF_NETWORK},
        "tp_shards": {"parallelism_config": "tp=2", "tp_plan": _OF_NETWORK, "fsdp": "full_shard"},
    },
    "xla": {},  # its devices are those of one process: xla_scenarios.py has its scenarios
    "mps": {"mps": {"strategy": "mps", "use_cpu": False}},
    "cuda": {"cuda": {"strategy": "single", "use_cpu": False}},
}
VARIANTS = {name: options for variants in BACKENDS.values() for name, options in variants.items()}
BACKEND_OF = {variant: name for name, variants in BACKENDS.items() for variant in variants}
# They have no ranks: what ranks share elsewhere, micro-batches share here.
ONE_PROCESS = ("cpu", "mps", "cuda")
# What is run with all other tests; `nox -s backend` runs every variant of one backend.
USUAL = ("ddp", "units", "offload")
# 32-bit sums in another order: a few units in the last place, over ten steps; another device has other kernels.
TOLERANCE = 2e-6
FARTHER = {"mps": 50, "cuda": 50}


def chosen(backends):
    """Return the names of all variants of some backends; without any, the usual ones."""
    return [name for name in VARIANTS if (BACKEND_OF[name] in backends if backends else name in USUAL)]


def missing_device(backend):
    """Return what this machine lacks for a backend, or nothing."""
    if backend == "cuda" and not torch.cuda.is_available():
        return "needs a CUDA device"
    return "needs a Mac's GPU" if backend == "mps" and not torch.backends.mps.is_available() else ""


def shared(variant, rows, world_size, accumulation=1):
    """Return the arguments by which data ranks, or micro-batches of one process, have `rows` rows together."""
    more = world_size if variant in ONE_PROCESS else 1
    sizes = {"per_device_train_batch_size": rows // world_size, "gradient_accumulation_steps": accumulation * more}
    return {**VARIANTS[variant], **sizes}


def together(variant):
    """Return how many processes, which follow each other, compute the same samples."""
    return 2 if "tp_plan" in VARIANTS[variant] else 1


def run_on(variant, function, world_size, *arguments, timeout_s=300):
    """Call a function in the processes of as many data ranks, or once in this one where the variant has no ranks."""
    if variant in ONE_PROCESS:
        return [function(*arguments)]
    return run_ranks(function, world_size * together(variant), *arguments, timeout_s=timeout_s)
