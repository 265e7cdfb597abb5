"""Where NEFTune's random numbers come from: the same after a resume, others everywhere else, nobody else's."""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

from tr_optim import NEFTune

IDS = torch.arange(12).reshape(2, 6)


def embedding():
    torch.manual_seed(0)
    return nn.Embedding(12, 16)


def noises(module, count=1, step=None, **options):
    with NEFTune(module, 5.0, **options) as neftune:
        if step is not None:
            neftune.set_step(step)
        return torch.stack([module(IDS) - module.weight[IDS] for _ in range(count)]).detach()


def test_noise_depends_on_seed_rank_step_and_call_alone():
    module = embedding()
    first = noises(module, 3, step=7, seed=1, rank=2)
    torch.manual_seed(123)
    assert torch.equal(first, noises(module, 3, step=7, seed=1, rank=2))
    others = [noises(module, 3, step=step, seed=s, rank=r) for step, s, r in ((8, 1, 2), (7, 2, 2), (7, 1, 0))]
    drawn = [part for parts in (first, *others) for part in parts]
    assert len({part.sum().item() for part in drawn}) == len(drawn) == 12


def test_a_loop_that_names_no_step_has_new_noise_in_each_call():
    first, second = noises(embedding(), 2)
    assert not torch.equal(first, second)


def test_the_default_generator_is_not_touched():
    module = embedding()
    before = torch.get_rng_state()
    noises(module, 2)
    assert torch.equal(before, torch.get_rng_state())
    noises(module, 2, seed=None)
    assert not torch.equal(before, torch.get_rng_state())


def test_calls_without_gradients_or_in_evaluation_do_not_count():
    module = embedding()
    expected = noises(module, 1, step=3)
    with NEFTune(module, 5.0) as neftune:
        neftune.set_step(3)
        with torch.no_grad():
            module(IDS)
        module.eval()(IDS)
        assert torch.equal((module.train()(IDS) - module.weight[IDS]).detach(), expected[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_has_the_noise_that_it_had(reentrant):
    module, seen = embedding(), []

    def layer(ids, anchor):
        vectors = module(ids)
        seen.append((vectors - module.weight[ids]).detach().clone())
        return (vectors * anchor).tanh()

    tokens = [IDS.clone(), IDS.clone()]
    with NEFTune(module, 5.0):
        for _ in range(2):
            anchor = torch.ones((), requires_grad=True)
            parts = [checkpoint(layer, ids, anchor, use_reentrant=reentrant) for ids in tokens]
            sum(part.sum() for part in parts).backward()
    assert len(seen) == 8
    rounds = [seen[:4], seen[4:]]
    for first, second, *again in rounds:
        assert {first.sum().item(), second.sum().item()} == {part.sum().item() for part in again}
    assert not torch.equal(rounds[0][0], rounds[1][0])
    if not reentrant:
        assert not torch.equal(seen[0], seen[1])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(12, 16), nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.words(input_ids))


@pytest.mark.parametrize(
    ("backend", "length"),
    [
        ("eager", "padded"),
        ("aot_eager", "real"),
        pytest.param("eager", "real", marks=pytest.mark.slow),
        pytest.param("aot_eager", "padded", marks=pytest.mark.slow),
    ],
)
@torch._dynamo.config.patch(automatic_dynamic_shapes=True)  # torch's default, which importing torch_xla ends
def test_a_compiled_model_has_the_same_noise_without_a_compilation_for_each_length(backend, length):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()  # torch 2.6 mixes up backends that compiled the same function before
    counter = CompileCounterWithBackend(backend)
    plain, model = Model(), Model()
    compiled = torch.compile(model._call_impl, backend=counter, fullgraph=True)
    compiled(IDS, attention_mask=None)  # compiled without noise: it must not be used
    assert counter.frame_count == 1
    state = torch.get_rng_state()
    with NEFTune(plain, 5.0, length=length) as first, NEFTune(model, 5.0, length=length) as second:
        for step, size in enumerate((4, 5, 6, 9, 9, 3)):
            ids = torch.full((2, size), step)
            mask = torch.ones_like(ids)
            mask[1, 2:] = 0
            for neftune in (first, second):
                neftune.set_step(step // 2)
            expected, found = plain(ids, attention_mask=mask), compiled(ids, attention_mask=mask)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
            for outputs in (expected, found):
                outputs.square().sum().backward()
        assert counter.frame_count <= 3  # one size, any size
    assert torch.equal(state, torch.get_rng_state())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5)
    clean = model(IDS)
    torch.testing.assert_close(compiled(IDS), clean, rtol=0, atol=1e-6)
    with NEFTune(model, 5.0):  # after calls without noise it comes back
        assert (compiled(IDS) - clean).abs().max() > 1e-2


def test_a_compiled_module_may_be_given_itself():
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    mask = torch.tensor([[1] * 6, [1] * 2 + [0] * 4])
    clean = model(IDS)
    with NEFTune(compiled, 5.0):
        found = compiled(IDS, attention_mask=mask) - clean
    assert found[1, 2:].abs().max() < 1e-6
    assert found[1, :2].abs().max() > 1e-2
