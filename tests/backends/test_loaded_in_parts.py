"""Models that `from_pretrained` divides as it loads them: taken over as they are, or refused."""

import os
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_mesh import ALONE, SHARDED, assert_close, in_the_night, llama, qwen, rows, train_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.integrations.tensor_parallel import apply_tensor_parallelism

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

pytestmark = pytest.mark.column("mesh")


def mixtral():
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_local_experts=4)
    )


MODELS = {"llama": llama, "tied": lambda: llama(tie_word_embeddings=True), "qwen": qwen, "mixtral": mixtral}


def join():
    meeting = f"file://{os.environ['TR_RENDEZVOUS_FILE']}_of_transformers"
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    return rank


def loaded_in_parts(folder, kind, parts=None):
    """Return the model of a folder, divided by transformers over all processes, or over so many that are neighbours."""
    rank = join()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if parts is None:
            return kind.from_pretrained(folder, tp_plan="auto")
    # `from_pretrained` divides over all processes, or applies fully_shard too.
    model = kind.from_pretrained(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // parts, parts), mesh_dim_names=("data", "tp"))["tp"]
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))
    if rank >= parts:  # rank 0's weights go to all replicas
        torch.nn.init.zeros_(model.get_input_embeddings().weight.to_local())
    return model


def train_in_parts(folder, name, options, parts=None, *arguments):
    model = loaded_in_parts(f"{folder}/loaded", type(MODELS[name]()), parts)
    assert isinstance(model.get_input_embeddings().weight, DTensor)
    found = train_model(f"{folder}/out", model, options, *arguments)
    dist.destroy_process_group()
    return found


FORMS = {
    "tp 2": (2, None, {"parallelism_config": "tp=2", "per_device_train_batch_size": 4}),
    "tp 2, replicas 2": (4, 2, {"parallelism_config": "tp=2,dp_replicate=2", "per_device_train_batch_size": 2}),
    "tp 2, shards 2": (4, 2, {"parallelism_config": "tp=2,dp_shard=2", "per_device_train_batch_size": 2, **SHARDED}),
}


@pytest.mark.parametrize(
    ("name", "form"),
    in_the_night(
        ("qwen", "tp 2"),
        ("llama", "tp 2"),
        ("llama", "tp 2, replicas 2"),
        ("llama", "tp 2, shards 2"),
        ("tied", "tp 2"),
        ("mixtral", "tp 2"),
    ),
)
def test_a_model_that_was_loaded_in_parts_trains_to_the_numbers_of_one_process(name, form, tmp_path):
    world, parts, options = FORMS[form]
    accumulated = {"gradient_accumulation_steps": 2}
    kind = type(MODELS[name]())
    MODELS[name]().save_pretrained(tmp_path / "loaded")
    alone = train_model(str(tmp_path / "alone"), kind.from_pretrained(tmp_path / "loaded"), ALONE | accumulated)
    found = run_ranks(train_in_parts, world, str(tmp_path), name, options | accumulated, parts, timeout_s=300)
    for rank in found:
        assert_close(rank, alone, 2e-5)
    assert found[0][1].keys() == alone[1].keys()
    exported = kind.from_pretrained(tmp_path / "out/model").state_dict()
    for key, value in found[0][1].items():
        assert torch.equal(exported[key], value)


@pytest.mark.slow
def test_a_checkpoint_of_a_model_that_was_loaded_in_parts_goes_on_in_one_process(tmp_path):
    llama().save_pretrained(tmp_path / "loaded")
    whole = train_model(str(tmp_path / "whole"), llama(), ALONE)
    run_ranks(train_in_parts, 2, str(tmp_path), "llama", FORMS["tp 2"][2], None, 2, timeout_s=300)
    resumed = train_model(str(tmp_path / "out"), llama(), ALONE, 4, True)
    assert_close((resumed[0][-4:], resumed[1]), (whole[0][-4:], whole[1]), 2e-5)


def build_with_divided(folder, refusals):
    """Build a Trainer with each of the options, for a model that is divided over all processes."""
    model = loaded_in_parts(folder, LlamaForCausalLM)
    for given, words in refusals:
        if given == REPLACED_BEFORE:
            model = LlamaForCausalLM.from_pretrained(folder)
            model.lm_head.forward = partial(type(model.lm_head).forward, model.lm_head)
            apply_tensor_parallelism(model, init_device_mesh("cpu", (2,)), model._expand_parallel_plan(model.tp_plan))
        if given == REPLACED:
            model.lm_head.forward = model.lm_head.forward.__call__
        args = TrainingArguments(f"{folder}/out", use_cpu=True, report_to="none", save_strategy="no", **given)
        with pytest.raises(ValueError, match=words):
            Trainer(model, args, train_dataset=rows(8))
    dist.destroy_process_group()


ALREADY = (
    r"of LlamaForCausalLM are divided over the processes \[{}\] already \(model.embed.*"
    r"tp_size takes over what transformers divided .*parallelism_config='tp={}'"
)
NO_PLAN = r" is divided as \(Shard\(dim=0\),\) already, which the plan does not \({}\); leave tp_plan out"
OTHERS = [
    {},
    SHARDED,
    *({"parallelism_config": f"{name}=2"} for name in ("sp", "pp", "ep")),
    {"strategy": "accelerate"},
]
REPLACED, REPLACED_BEFORE = ({"parallelism_config": "tp=2", "seed": seed} for seed in (1, 2))
PLANS = {
    "no style": {"model.layers.*.mlp.up_proj": "colwise"},
    "embedding_colwise": {"model.embed_tokens": "embedding_colwise"},
}
REFUSALS = {
    2: [
        *((options, ALREADY.format("0, 1", 2)) for options in OTHERS),
        *(({"parallelism_config": "tp=2", "tp_plan": plan}, NO_PLAN.format(style)) for style, plan in PLANS.items()),
        *(
            (given, "the forward of lm_head was replaced before or after transformers divided it; replace it after the")
            for given in (REPLACED, REPLACED_BEFORE)
        ),
    ],
    4: [({"parallelism_config": "tp=2,dp_replicate=2"}, ALREADY.format("0, 1, 2, 3", 4))],
}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_that_was_loaded_in_parts_is_refused_where_nothing_takes_it_over(world, tmp_path):
    llama().save_pretrained(tmp_path)
    run_ranks(build_with_divided, world, str(tmp_path), REFUSALS[world], timeout_s=300)
