import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tr_dist import DDP, LaunchEnvironment, ProcessGroup
from tr_dist.replica import moved
from tr_dist.testing import run_ranks


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(self.body(x))


def _step(model, strategy, forward=None):
    with strategy.accumulate(model, sync=True):
        strategy.backward((forward or model)(torch.ones(1, 2)).sum())


def _train_two_heads(find_unused_parameters):
    with DDP(use_cpu=True, find_unused_parameters=find_unused_parameters) as strategy:
        model = strategy.prepare(TwoHeads())
        for _ in range(2):
            _step(model, strategy)
        return strategy.unwrap(model).used.weight.grad is not None


def test_a_parameter_without_gradient_is_an_error_in_the_very_first_step():
    with pytest.raises(RuntimeError) as caught:
        run_ranks(_train_two_heads, 2, False)
    assert str(caught.value).startswith(
        "2 of 6 trainable parameters (unused.weight, unused.bias) got no gradient from the last micro-batch"
    )
    assert "--ddp_find_unused_parameters true" in str(caught.value)


def test_a_parameter_without_gradient_is_found_when_that_is_asked_for():
    assert run_ranks(_train_two_heads, 2, True) == [True, True]


def _go_round_the_wrapper():
    with DDP(use_cpu=True) as strategy:
        inner = nn.Linear(2, 1)
        _step(strategy.prepare(inner), strategy, forward=inner)


def test_a_forward_round_the_prepared_module_is_an_error():
    with pytest.raises(RuntimeError, match=r"no forward went through the module that prepare\(\) returned"):
        run_ranks(_go_round_the_wrapper, 2)


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("earlier", [0, 1])
def test_a_last_micro_batch_without_backward_is_an_error(earlier, find_unused_parameters):
    with DDP(use_cpu=True, find_unused_parameters=find_unused_parameters) as strategy:
        model = strategy.prepare(TwoHeads() if find_unused_parameters else nn.Linear(2, 1))
        for _ in range(earlier):
            with strategy.accumulate(model, sync=False):
                strategy.backward(model(torch.ones(1, 2)).sum())
        with (
            pytest.raises(RuntimeError, match=r"without a backward, so no gradient was averaged|got no gradient from"),
            strategy.accumulate(model, sync=True),
        ):
            model(torch.ones(1, 2))


def test_an_error_in_a_micro_batch_is_not_replaced_by_another():
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(nn.Linear(2, 1))
        with pytest.raises(KeyError, match="mine"), strategy.accumulate(model, sync=True):
            raise KeyError("mine")


def _differ_after_prepare():
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
        with torch.no_grad():
            strategy.unwrap(model)[1].weight += 1e-7 * strategy.rank
        _step(model, strategy)


def test_weights_that_differ_before_the_first_step_are_an_error():
    with pytest.raises(
        RuntimeError, match=r"1 of 4 parameters differ .* the first is 1\.weight: rank \[1\] not as rank 0"
    ):
        run_ranks(_differ_after_prepare, 2)


def _differ_by_changes_that_cancel():
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(nn.Linear(2, 1))
        with torch.no_grad():  # as many units up as down: the bit patterns of both ranks have one sum
            step = 2.0**-20 * (strategy.rank == 1)
            strategy.unwrap(model).weight.copy_(torch.tensor([[1.0 + step, -1.5 + step]]))
        _step(model, strategy)


def test_differences_of_weights_that_cancel_in_a_sum_are_seen():
    with pytest.raises(RuntimeError, match=r"1 of 2 parameters differ .* the first is weight: rank \[1\]"):
        run_ranks(_differ_by_changes_that_cancel, 2)


def _every_dtype():
    module = nn.Module()
    complex_here = (torch.complex64,) if torch.__version__ >= (2, 9) else ()  # gloo of an older one moves none
    for number, dtype in enumerate((torch.float64, torch.bfloat16, torch.float16, *complex_here)):
        module.register_parameter(f"p{number}", nn.Parameter(torch.ones(3, 2, dtype=dtype).t()))
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(module)
        with strategy.accumulate(model, sync=False):
            return True


def test_weights_of_every_dtype_and_layout_are_compared():
    assert run_ranks(_every_dtype, 2) == [True, True]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 1).requires_grad_(False), r"Linear has no trainable parameter \(total 2, frozen 2\)"),
        (nn.ReLU(), r"ReLU has no trainable parameter \(total 0, frozen 0\)"),
        (nn.Linear(2, 1, device="meta"), r"2 parameters of Linear are on the meta device \(weight, bias\)"),
        (nn.DataParallel(nn.Linear(2, 1)), "wrapped in DataParallel already; give prepare"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(model, message):
    with DDP(use_cpu=True) as strategy, pytest.raises(ValueError, match=message):
        strategy.prepare(model)


def with_a_buffer(dtype):
    model = nn.Linear(2, 1)
    model.register_buffer("scales", torch.zeros(2).to(dtype))
    return model


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn, torch.uint32])
def test_a_buffer_that_cannot_be_sent_is_named_with_what_to_do(dtype):
    model = with_a_buffer(dtype)
    with DDP(use_cpu=True) as strategy:
        with pytest.raises(ValueError, match=rf"copy 1 parameters and .* \(scales: {dtype}\); keep them as"):
            strategy.prepare(model)
        model._ddp_params_and_buffers_to_ignore = ["scales"]
        _step(strategy.prepare(model), strategy)


SENT = [torch.int8, torch.uint8, torch.int32, torch.bool, torch.bfloat16]
SENT += [torch.complex64] if torch.__version__ >= (2, 9) else []  # gloo of an older torch moves none


@pytest.mark.parametrize("dtype", SENT)
def test_buffers_of_other_types_are_sent(dtype):
    with DDP(use_cpu=True) as strategy:
        _step(strategy.prepare(with_a_buffer(dtype)), strategy)


def test_a_model_on_another_accelerator_is_refused():
    from tr_dist.base import check_trainable

    class Elsewhere(nn.Linear):
        def named_parameters(self, *args, **kwargs):  # no second accelerator is at hand: only its name is
            yield "weight", type("P", (), {"requires_grad": True, "device": torch.device("cuda", 1)})()

    with pytest.raises(ValueError, match="has 1 parameters on cuda:1, but this rank computes on cuda:0"):
        check_trainable(Elsewhere(2, 1), torch.device("cuda", 0))


def test_accumulating_on_another_module_is_refused():
    with DDP(use_cpu=True) as strategy, pytest.raises(TypeError, match=r"prepare\(\) returned, not Linear"):
        strategy.accumulate(nn.Linear(2, 1), sync=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp16"}, "fp16=True cannot train on a CPU"),
        ({"precision": "fp8"}, "precision='fp8' is not known; choose no, bf16 or fp16"),
        ({"backend": "smoke"}, "this torch has no 'smoke'; it has .*gloo"),
        ({"timeout_s": 0}, "timeout_s=0 must be positive"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DDP(use_cpu=True, **arguments)


def test_nccl_on_the_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    with pytest.raises(ValueError, match="backend='nccl' carries CUDA tensors only, and this rank computes on cpu"):
        ProcessGroup(LaunchEnvironment(), torch.device("cpu"), backend="nccl")


def _ask_for_another_rank():
    rank = int(os.environ["RANK"])
    store = dist.FileStore(os.environ["TR_RENDEZVOUS_FILE"], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 0:
        return ""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0"  # as a launcher does that sets them alike on every rank
    with pytest.raises(RuntimeError) as caught:
        DDP(use_cpu=True)
    return str(caught.value)


def test_a_group_that_contradicts_the_environment_is_refused():
    _, second = run_ranks(_ask_for_another_rank, 2)
    assert second.startswith("the process group has rank 1 of 2, but the launch environment says rank 0 of 2")


def test_an_existing_group_of_another_backend_is_refused():
    with (
        DDP(use_cpu=True),
        pytest.raises(RuntimeError, match=r"the process group that exists has backend .*gloo.*, not fake"),
    ):
        DDP(use_cpu=True, backend="fake")


class Fixed(TwoHeads):
    """Refuses to be moved, as one with quantized weights or hooks of accelerate does."""

    def to(self, *args, **kwargs):
        raise RuntimeError("cannot be moved")


def _train_fixed():
    with DDP(use_cpu=True, find_unused_parameters=True) as strategy:
        model = strategy.prepare(Fixed())
        _step(model, strategy)
        return strategy.unwrap(model).used.weight.grad is not None


def test_a_model_that_is_where_it_is_to_be_is_not_moved():
    assert run_ranks(_train_fixed, 2) == [True, True]


def test_a_model_that_is_divided_over_devices_is_refused():
    model = TwoHeads()
    model.hf_device_map = {"body": "cpu", "used": 0}
    with pytest.raises(ValueError, match=r"divided over devices \(hf_device_map\), and every rank needs one"):
        moved(model, torch.device("cuda", 0))
    assert moved(model, torch.device("cpu")) is model


def test_a_parameter_that_is_unfrozen_after_prepare_is_an_error():
    with DDP(use_cpu=True) as strategy:
        inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        inner[0].requires_grad_(False)
        model = strategy.prepare(inner)
        _step(model, strategy)
        inner[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"2 parameters \(0.weight, 0.bias\) were frozen when the model"):
            _step(model, strategy)


def test_a_part_replaced_before_training_is_prepared_again_and_one_replaced_after_it_is_refused():
    with DDP(use_cpu=True) as strategy:
        inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        strategy.prepare(inner)
        inner[1] = nn.Linear(2, 1)
        model = strategy.prepare(inner)
        _step(model, strategy)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        norm = strategy.clip_grad_norm(model, optimizer, None)
        assert torch.equal(norm, nn.utils.get_total_norm([p.grad for p in inner.parameters()]))
        inner[1] = nn.Linear(2, 1)
        with pytest.raises(ValueError, match="modules or parameters of Sequential were replaced after it was trained"):
            strategy.prepare(inner)
