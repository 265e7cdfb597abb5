"""A mesh of 1,024 processes of which one runs here: what it makes, exchanges, and says of itself in a save."""

import pickle
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from transformers import LlamaConfig, LlamaForCausalLM

from tr_core import Trainer, TrainingArguments
from tr_dist.fake_ranks import fake_rank
from tr_dist.mesh.data_ranks import DataRanks
from tr_dist.mesh.pipeline import Pipeline

pytestmark = pytest.mark.column("mesh")
STAGES, SHARDS, PARTS, BATCHES, HIDDEN = 8, 8, 16, 4, (2, 6, 32)
LAST = {"loss": torch.ones(()), "logits": torch.ones(HIDDEN)}  # vocabulary and hidden states are of one size here


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "head_dim": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, **sizes))


@contextmanager
def counted(place):
    """Count groups made, what is passed on, and bytes of what is said to the row; say what neighbours would."""
    groups, passed, said = list[int](), Counter[tuple[str, int, int]](), list[int]()
    new_group, new_op, gather = dist.new_group, dist.P2POp.__init__, DataRanks.gather_objects

    def make(ranks, *given, **named):
        groups.append(len(ranks))
        return new_group(ranks, *given, **named)

    def plan(op, kind, tensor, *given, **named):
        new_op(op, kind, tensor, *given, **named)
        passed[kind.__name__, tensor.nbytes, op.group_peer] += 1

    def say(ranks, value):
        said.append(len(pickle.dumps(value)))
        return gather(ranks, value)

    with (
        fake_rank(place * SHARDS * PARTS, STAGES * SHARDS * PARTS, local_world_size=PARTS),
        mock.patch.object(dist, "new_group", make),
        mock.patch.object(dist.P2POp, "__init__", plan),
        mock.patch.object(DataRanks, "gather_objects", say),
        mock.patch.object(PipelineStage, "_warmup_forward_vote", return_value=torch.ones(1)),
        mock.patch.object(PipelineStage, "_warmup_backward_result", return_value=torch.ones(1)),
        mock.patch.object(Pipeline, "_receive", return_value=torch.ones(HIDDEN)),
        mock.patch.object(Pipeline, "_from_last", return_value=LAST),
    ):
        yield groups, passed, said


def test_a_process_of_1024_takes_a_step_and_says_what_it_saves(tmp_path):
    place = 3  # torch keeps names of groups of equal meshes, so one process here is one there
    with counted(place) as (groups, passed, said):
        options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "log_level": "error"}
        args = TrainingArguments(
            str(tmp_path),
            parallelism_config=f"pp={STAGES},dp_shard={SHARDS},tp={PARTS}",
            fsdp="full_shard auto_wrap",
            max_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=BATCHES,
            save_strategy="no",
            **options,
        )
        rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * (2 * BATCHES * SHARDS)
        trainer = Trainer(model(), args, train_dataset=rows)
        trainer.train()
        size, neighbours = torch.empty(HIDDEN).nbytes, [near for near in (place - 1, place + 1) if 0 <= near < STAGES]
        assert passed == {(kind, size, near): BATCHES for near in neighbours for kind in ("isend", "irecv")}

        said.clear()
        parts = trainer.strategy.state_parts(trainer.model_wrapped, trainer.optimizer)
        own, held = parts["model"]._stages.of_all(trainer.model.state_dict()), parts["optimizer"].state_dict()["state"]
        mine = ("model.layers.6.", "model.layers.7.")
        layers = {name for name, _ in model().named_parameters() if name.startswith(mine)}
        assert own.keys() == layers  # the row says as much as this stage does, eight times
        assert len(held) == len(layers)
        # Names and forms, and no tensors: of the model, of the optimizer's groups, and of its state.
        assert len(said) == 3
        assert sum(said) < 10_000
        # Those of the samples and of the row, each also on the host, and those that hold the model together.
        assert groups == [SHARDS, SHARDS, STAGES, STAGES, STAGES * SHARDS * PARTS]
        trainer.strategy.close()
