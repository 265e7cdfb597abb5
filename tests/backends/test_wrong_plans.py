"""Wrong plans, each refused when the Trainer is built, with the words that mend it."""

import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tr_core import Seq2SeqTrainingArguments, Trainer
from tr_dist.fake_ranks import fake_rank

pytestmark = [pytest.mark.column("mesh"), pytest.mark.row("refused")]
SHARDED = {"fsdp": "full_shard auto_wrap"}
SIZES = "parallelism_config"

# processes, arguments -> words of the refusal
WRONG = {
    "tp of 3 among 8": (
        8,
        {SIZES: "tp=3"},
        "start a multiple, or leave it out; with 8 processes it may be tp_size 2 or 4",
    ),
    "product too large": (
        8,
        {SIZES: "tp=4,dp_shard=4", **SHARDED},
        "with 8 processes it may be tp_size 2, or dp_shard_size 2",
    ),
    "product too small": (8, {SIZES: "tp=2,dp_shard=2", **SHARDED}, "it may be tp_size 4, or dp_shard_size 4"),
    "replicas alone": (
        8,
        {SIZES: "dp_replicate=4"},
        "start as many as their product, or leave it out; with 8 processes i",
    ),
    "heads": (6, {SIZES: "tp=3"}, "tp_size=3 does not divide num_attention_heads=16; 2 do"),
    "keys": (8, {SIZES: "tp=8"}, "tp_size=8 does not divide num_key_value_heads=4; 2, 4 do"),
    "words": (8, {SIZES: "tp=4"}, "tp_size=4 does not divide num_embeddings=22 of model.embed_tokens; 2 do"),
    "pieces of heads": (8, {SIZES: "sp=8"}, "sp_size=8 does not divide num_key_value_heads=4; 2, 4 do"),
    "a plan of no module": (
        2,
        {SIZES: "tp=2", "tp_plan": {"lm_head": "replicate"}},
        "the plan of LlamaForCausalLM names none of its modules (lm_head); give one as tp_plan",
    ),
    "one process": (1, {SIZES: "tp=2"}, "and 1 were started (WORLD_SIZE); start a multiple, or leave it out"),
    "strategy ddp": (
        2,
        {SIZES: "tp=2", "strategy": "ddp"},
        "divides a model by tp_size with strategy='mesh' or 'auto'",
    ),
    "strategy fsdp": (2, {SIZES: "tp=2", "strategy": "fsdp", **SHARDED}, "by tp_size with strategy='mesh' or 'auto'"),
    "shards without fsdp": (
        2,
        {SIZES: "dp_shard=2"},
        "divides a model by dp_shard_size; set fsdp='full_shard auto_wrap' t",
    ),
    "shards of no_shard": (
        4,
        {SIZES: "tp=2,dp_shard=2", "fsdp": "no_shard"},
        "use fsdp='full_shard', or leave dp_shard_si",
    ),
    "a plan alone": (2, {"tp_plan": {"layers.*.up": "colwise"}}, "says what tp_size divides; set tp_size too"),
    "an unknown pattern": (
        2,
        {SIZES: "tp=2", "tp_plan": {"layer.*": "colwise"}},
        "no module is called 'layer.*'; there are",
    ),
    "an unknown style": (2, {SIZES: "tp=2", "tp_plan": {"lm_head": "columns"}}, "the styles are colwise, rowwise"),
    "a style of others": (
        2,
        {SIZES: "tp=2", "tp_plan": {"lm_head": "embedding_rowwise"}},
        "for Embedding, and is a Linear",
    ),
    "pieces twice": (4, {SIZES: "cp=2,sp=2"}, "cp_size=2 is not done with pp_size, nor cp_size with sp_size"),
    "pieces of stages": (4, {SIZES: "cp=2,pp=2"}, "cp_size=2 is not done with pp_size"),
    "heads of stages": (4, {SIZES: "sp=2,pp=2"}, "sp_size=2 is not done with pp_size"),
    "a loss in parts of pieces": (
        4,
        {SIZES: "tp=2,sp=2", "tp_plan": {"lm_head": "colwise_loss_parallel"}},
        "'colwise_loss_parallel' is not done with sp_size or cp_size; use 'colwise_gather_output'",
    ),
    "norms of pieces of pieces": (
        4,
        {SIZES: "tp=2,sp=2", "tp_plan": {"model.norm": "sequence_parallel"}},
        "'sequence_parallel' is not done with sp_size or cp_size; leave it out",
    ),
    "norms of pieces beside experts": (
        2,
        {SIZES: "tp=2", "tp_plan": {"model.norm": "sequence_parallel", "lm_head": "moe_tp_experts"}},
        "'sequence_parallel' is not done with moe_tp_experts; leave it out",
    ),
    "compiled parts": (
        2,
        {SIZES: "tp=2", "torch_compile": True},
        "torch_compile is not done with tp_size; leave it out",
    ),
    "noise of parts": (2, {SIZES: "tp=2", "neftune_noise_alpha": 5.0}, "neftune_noise_alpha is not done with tp_size"),
    "noise of pieces": (2, {SIZES: "sp=2", "neftune_noise_alpha": 5.0}, "neftune_noise_alpha is not done with sp_size"),
    "tokens of pieces": (
        2,
        {SIZES: "sp=2", "predict_with_generate": True},
        "predict_with_generate is not done with sp_",
    ),
    "an average of stages": (2, {SIZES: "pp=2", "ema_decay": 0.9}, "ema_decay is not done with pp_size; leave it out"),
    "a stage of no layer": (2, {SIZES: "pp=2", "pp_split": ["layers.7"]}, "pp_split names layers.7"),
    "a mistyped name": (2, {SIZES: "tpp=2"}, "unknown key tpp_size; did you mean tp_size?"),
    "a size of zero": (2, {SIZES: "tp=0"}, "needs a number of processes, from 1"),
    "split batches": (2, {SIZES: "tp=2", "accelerator_config": {"split_batches": True}}, "give a replica's"),
    "rank 0 loads": (
        4,
        {SIZES: "tp=2,dp_shard=2", **SHARDED, "fsdp_config": {"cpu_ram_efficient_loading": True}},
        "cpu_ram_efficient_loading is not done with tp_size; leave it out",
    ),
}


def build(folder, options):
    args = Seq2SeqTrainingArguments(folder, use_cpu=True, report_to="none", **options)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=22, num_hidden_layers=1, **heads))
    Trainer(model, args, train_dataset=[{"input_ids": torch.arange(4)}])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_refused_with_the_words_that_mend_it(name, tmp_path):
    world, options, words = WRONG[name]
    with fake_rank(0, world), pytest.raises(ValueError, match=re.escape(words)):
        build(str(tmp_path), options)
