"""Optimizers on the shards of many ranks: what each rank holds and sums, and what was computed before."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

BENCH = Path(__file__).parents[1] / "packages/tr-dist/bench/ranks.py"
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of the modes that count collectives


def state_of(optimizer):
    """Return the tensors of a state by name, parameter after parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [{name: value for name, value in state.items() if value.dim()} for state in states]


def alone(bench, build):
    """Return the state after a step of one process."""
    torch.manual_seed(0)
    model = bench.llama.build("tiny", torch.bfloat16, "cpu")
    optimizer = build(model)
    loss = model(torch.zeros(1, 8, dtype=torch.int64))
    if getattr(optimizer, "fused_in_backward", False):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    return state_of(optimizer)


NAMES = [
    "AdamW",
    "AdamW8bit",
    "Adafactor",
    "GaLoreAdamW",
    "GaLoreAdamW, layer-wise",
    "GaLoreAdamW8bit, layer-wise",
    "GaLoreAdafactor, layer-wise",
    "APOLLOAdamW, layer-wise",
    "FiraAdamW, layer-wise",
    "Lomo",
    "AdaLomo",
]


SLOW = [name for name in NAMES if name not in ("AdamW", "GaLoreAdamW8bit, layer-wise")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NAMES])
def test_parts_of_a_state_are_those_of_one_process_and_all_else_is_on_every_rank(bench, name):
    """A rank holds its rows of what has a parameter's rows, and the whole of the rest."""
    build, ranks, held = bench.OPTIMIZERS[name], 8, []
    for rank in range(ranks):
        with bench.prepared("tiny", "full_shard", rank, ranks, are_real=True) as (strategy, model):
            measured = bench.measure(strategy, model, build)  # which compares it with the computed sizes
            optimizer = build(model)
            step(strategy, model, optimizer)
            held.append([{key: local(v).shape for key, v in state.items()} for state in state_of(optimizer)])
            assert measured.state == sum(
                local(v).numel() * v.element_size() for s in optimizer.state.values() for v in s.values()
            )
    whole = alone(bench, build)
    assert [state.keys() for state in held[0]] == [state.keys() for state in whole] or name == "AdamW8bit"
    for number, state in enumerate(whole):
        for key in state.keys() & held[0][number].keys():
            shapes = [parts[number][key] for parts in held]
            if shapes[0] == state[key].shape:
                assert set(shapes) == {state[key].shape}
            else:
                assert sum(shape[0] for shape in shapes) == len(state[key])
                assert all(shape[1:] == state[key].shape[1:] for shape in shapes)


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def step(strategy, model, optimizer):
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    if getattr(optimizer, "fused_in_backward", False):
        optimizer.bind(strategy)
        with strategy.accumulate_fused(model, last=True):
            optimizer.backward(model(tokens))
    else:
        with strategy.accumulate(model, sync=True):
            strategy.backward(model(tokens))
    optimizer.step()


@pytest.mark.parametrize(
    "name",
    [
        *("AdamW", "GaLoreAdamW8bit, layer-wise"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("FiraAdamW, layer-wise", "AdaLomo")),
    ],
)
def test_a_step_over_shapes_holds_and_exchanges_what_one_over_numbers_does(bench, name):
    found = []
    for are_real in (True, False):
        with bench.prepared("tiny", "full_shard", 63, 64, are_real=are_real) as (strategy, model):
            found.append(bench.measure(strategy, model, bench.OPTIMIZERS[name]))
    assert found[0] == found[1]
    units = 3  # two layers, and the rest
    assert found[0].exchanges["all-gather"][0] == 2 * units
    assert found[0].exchanges["reduce-scatter"][0] == units


def test_collectives_are_counted_as_torch_counts_them(bench):
    with bench.prepared("tiny", "full_shard", 0, 8, are_real=True) as (strategy, model), CommDebugMode() as torchs:
        held = bench.measure(strategy, model, bench.OPTIMIZERS["GaLoreAdamW, layer-wise"])
    assert sum(number for number, _ in held.exchanges.values()) == torchs.get_total_counts()


@pytest.mark.slow
def test_1024_ranks_are_measured(bench, capsys):
    bench.main(["--size", "tiny", "--ranks", "1024", "--step-at", "1024", "--table", "optimizers"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["optimizer", *NAMES]
