"""Which modules are divided over the processes of a sample, and what is refused before anything is."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn

from tr_dist.fake_ranks import fake_rank
from tr_dist.fsdp.settings import Sharding
from tr_dist.mesh import Mesh
from tr_dist.mesh.sequence import Sequences
from tr_dist.mesh.tensor import Tensor, check_sizes, plan_of


def network(**config):
    layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in range(2))
    model = nn.ModuleDict({"words": nn.Embedding(10, 8), "norm": nn.LayerNorm(8), "layers": layers})
    model.config = SimpleNamespace(**config)
    return model


def test_a_pattern_names_one_word_of_a_name_each():
    plan = {"layers.*.up": "colwise", "layers.1.down": "rowwise", "norm": "replicate"}
    assert plan_of(network(), plan) == {
        "layers.0.up": "colwise",
        "layers.1.up": "colwise",
        "layers.1.down": "rowwise",
    }


def test_the_plan_of_a_model_may_name_what_it_lacks_and_have_former_names():
    model = network()
    model._tp_plan = {"layers.*.up": "colwise_rep", "lm_head": "colwise"}
    assert plan_of(model, None) == dict.fromkeys(("layers.0.up", "layers.1.up"), "colwise_gather_output")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (None, "divides matrices by a plan, and ModuleDict has none; give one as tp_plan, such as"),
        ({"layers.*.over": "colwise"}, r"no module is called 'layers.\*.over'; there are layers, layers.0, layers.0.d"),
        (
            {"layers.*.up": "columns"},
            r"'layers.\*.up' is to be divided by 'columns', which is not done here; the styles",
        ),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(plan, said):
    with pytest.raises(ValueError, match=said):
        plan_of(network(), plan)


@pytest.mark.parametrize(
    ("config", "styles", "size", "said"),
    [
        ({"num_key_value_heads": 6}, {}, 4, "tp_size=4 does not divide num_key_value_heads=6; 2, 3, 6 do"),
        ({"num_key_value_heads": 1}, {}, 2, "tp_size=2 does not divide num_key_value_heads=1; no other sizes do"),
        ({}, {"layers.0.up": "colwise"}, 5, "tp_size=5 does not divide out_features=12 of layers.0.up; 2, 3, 4, 6, 12"),
        ({}, {"layers.0.up": "rowwise"}, 3, "tp_size=3 does not divide in_features=8 of layers.0.up; 2, 4, 8 do"),
        ({}, {"words": "embedding_rowwise"}, 4, "tp_size=4 does not divide num_embeddings=10 of words; 2, 5, 10 do"),
        (
            {},
            {"layers.0.up": "mla_kv_a_proj"},
            2,
            "'mla_kv_a_proj' of layers.0.up needs qk_rope_head_dim in the model's",
        ),
        ({}, {"norm": "colwise"}, 2, "norm is to be divided by 'colwise', which is for Linear, and is a LayerNorm"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(config, styles, size, said):
    with pytest.raises(ValueError, match=said):
        check_sizes(network(**config), styles, size)


def test_sizes_that_divide_are_accepted():
    check_sizes(network(num_attention_heads=4), {"layers.0.up": "colwise", "layers.0.down": "rowwise"}, 4)


@pytest.mark.parametrize(("tp", "on_machine", "warnings"), [(2, 4, 0), (4, 2, 1)])
def test_a_process_knows_its_place_and_says_once_where_neighbours_are_apart(caplog, tp, on_machine, warnings):
    caplog.set_level("WARNING", "tr_dist.mesh.strategy")
    with fake_rank(13, 16, local_world_size=on_machine):
        for _ in range(2):
            mesh = Mesh(Sharding("hybrid_shard", replicas=2), directions=[Tensor(tp)], use_cpu=True)
            inside = 16 // tp // 2
            assert mesh.coordinates == {"dp_replicate": 1, "dp_shard": 13 // tp % inside, "tp": 13 % tp}
            assert mesh.sizes == {"tp_size": tp}
            mesh.close()
    said = [record.getMessage() for record in caplog.records if "exchange in every layer" in record.getMessage()]
    assert len(said) == warnings


def test_pieces_of_a_sequence_are_those_of_processes_with_the_same_part_of_matrices():
    with fake_rank(13, 16):
        pieces = Sequences(2)
        mesh = Mesh(Sharding("hybrid_shard", replicas=2), directions=[pieces, Tensor(2)], use_cpu=True)
        assert (pieces.rank, dist.get_process_group_ranks(pieces.group)) == (0, [13, 15])
        mesh.close()
