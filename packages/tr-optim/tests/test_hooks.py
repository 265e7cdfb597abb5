import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tr_optim.engine.hooks import BackwardPass


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def collect(parameters):
    taken = []
    return taken, BackwardPass(parameters, lambda parameter, gradient: taken.append((parameter, gradient)))


def loss_of(module, seed=1):
    return module(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).square().mean()


def test_gradients_are_handed_over_and_freed_while_the_backward_pass_goes_on():
    plain, net = model(), model()
    loss_of(plain).backward()
    alive = []

    def consume(parameter, gradient):
        assert parameter.grad is None
        assert not torch.is_grad_enabled()
        alive.append(sum(p.grad is not None for p in net.parameters()))

    taken, hooks = collect(net.parameters())
    hooks.run(loss_of(net))
    gradients = {id(p): g for p, g in taken}
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(gradients[id(p)], q.grad)
        assert p.grad is None
    hooks.detach()
    BackwardPass(net.parameters(), consume).run(loss_of(net))
    assert alive == [0, 0, 0, 0]


def test_a_plain_backward_is_left_alone():
    net = model()
    taken, hooks = collect(net.parameters())
    hooks.run(loss_of(net))
    taken.clear()
    loss_of(net).backward()
    assert taken == []
    assert all(p.grad is not None for p in net.parameters())


def test_a_gradient_that_is_there_already_is_refused():
    net = model()
    _, hooks = collect(net.parameters())
    loss_of(net).backward()
    with pytest.raises(RuntimeError, match=r"of shape \(8, 4\) holds a gradient that this backward pass did not make"):
        hooks.run(loss_of(net))


def test_other_parameters_keep_their_gradients():
    net = model()
    taken, hooks = collect([net[0].weight])
    hooks.run(loss_of(net))
    assert [p is net[0].weight for p, _ in taken] == [True]
    assert net[0].weight.grad is None
    assert net[0].bias.grad is not None


def test_a_parameter_without_a_gradient_is_passed_over():
    net = model()
    extra = nn.Parameter(torch.zeros(3))
    taken, hooks = collect([*net.parameters(), extra])
    hooks.run(loss_of(net))
    assert len(taken) == 4


def test_hooks_come_off_and_go_on_again():
    net = model()
    taken, hooks = collect(net.parameters())
    hooks.run(loss_of(net))
    hooks.detach()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    hooks.run(loss_of(net))
    assert len(taken) == 8


def test_an_error_in_a_hook_ends_the_backward_pass_and_disarms():
    net = model()

    def fail(parameter, gradient):
        raise ValueError("on purpose")

    hooks = BackwardPass(net.parameters(), fail)
    with pytest.raises(ValueError, match="on purpose"):
        hooks.run(loss_of(net))
    net.zero_grad()
    loss_of(net).backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_parameter_does_not_keep_an_optimizer_alive():
    net = model()
    _, hooks = collect(net.parameters())
    hooks.run(loss_of(net))
    gone = weakref.ref(hooks)
    del hooks
    gc.collect()
    assert gone() is None
    loss_of(net).backward()
    assert net[0].weight.grad is not None


def test_a_copied_model_has_no_hooks():
    net = model()
    taken, hooks = collect(net.parameters())
    hooks.run(loss_of(net))
    assert taken, "the model itself has them"
    taken.clear()
    hooks.run(loss_of(copy.deepcopy(net)))
    assert taken == []


class Reused(nn.Module):
    """A weight that three reentrantly checkpointed segments use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=True)
        return x.square().mean()


def data():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)


def test_a_gradient_in_parts_is_refused():
    net = Reused()
    _, hooks = collect(net.parameters())
    with pytest.raises(RuntimeError, match="got its gradient in several parts .* Set use_reentrant=False"):
        hooks.run(net(data()))


def test_a_shared_parameter_is_handed_over_whole_at_the_end():
    plain, net = Reused(), Reused()
    plain(data()).backward()
    taken = []
    hooks = BackwardPass(net.parameters(), lambda p, g: taken.append((p, g)), shared=list(net.parameters()))
    hooks.run(net(data()))
    assert len(taken) == 2
    for (p, gradient), q in zip(taken, plain.parameters(), strict=True):
        assert p.grad is None
        torch.testing.assert_close(gradient, q.grad, rtol=0, atol=0)


def test_a_backward_within_a_backward_is_refused():
    net = model()
    hooks = None

    def again(parameter, gradient):
        hooks.run(loss_of(net))

    hooks = BackwardPass(net.parameters(), again)
    with pytest.raises(RuntimeError, match="was begun within another"):
        hooks.run(loss_of(net))
