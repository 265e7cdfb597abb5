"""A model of transformers, trained in shards, is saved, exported and loaded by `from_pretrained`."""

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from tr_ckpt import Checkpointer
from tr_ckpt.sharded import export, stateful
from tr_dist.testing import run_ranks

TOKENS = torch.arange(24).reshape(2, 12) % 23


def small_model(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train_and_save(directory, tied):
    """Two steps of AdamW on all ranks; returns the logits of the trained model."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    meeting = f"file://{os.environ['TR_RENDEZVOUS_FILE']}"
    dist.init_process_group("gloo", meeting, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    model = small_model(tied)
    config = model.config
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def gather_objects(value):
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    checkpointer = Checkpointer(
        directory, rank=dist.get_rank(), world_size=dist.get_world_size(), gather_objects=gather_objects
    )
    checkpointer.save(2, stateful(model, optimizer), write_extra=config.save_pretrained)
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def trained(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    logits, *_ = run_ranks(train_and_save, 2, str(directory), request.param, timeout_s=180)
    return directory, request.param, logits


@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 3000}], ids=["one file", "several files"])
def test_an_exported_model_loads_in_from_pretrained(trained, tmp_path, options):
    from transformers import LlamaForCausalLM

    directory, tied, logits = trained
    files = export(directory / "checkpoint-2", tmp_path / "model", **options)
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 1) == bool(options)
    assert tmp_path / "model" / "config.json" in files

    loaded, report = LlamaForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(input_ids=TOKENS).logits, logits)

    # And as a part, by one process without a mesh.
    plain = small_model(tied)
    assert Checkpointer(directory).restore({"model": plain}) == 2
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in plain.state_dict().items())
