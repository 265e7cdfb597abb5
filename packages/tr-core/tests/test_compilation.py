"""Compiled calls: the same numbers, names and files, and only while the Trainer calls the model."""

import copy

import pytest
import torch
from support.data import samples
from support.models import Classifier, CountedSum, IgnoresCount
from torch import nn

from tr_core import Trainer, TrainerCallback
from tr_core.runtime.compilation import Compilation
from tr_log.phases import active_clock

dynamo = pytest.importorskip("torch._dynamo")


@pytest.fixture(autouse=True)
def fresh_compiler():
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.fixture
def counting_backend():
    """A backend that counts the graphs it is given, and how often they run."""
    counts = {"graphs": 0, "calls": 0}

    def backend(graph, example_inputs):
        counts["graphs"] += 1

        def run(*args):
            counts["calls"] += 1
            return graph.forward(*args)

        return run

    dynamo.register_backend(backend, "counting_for_tests")
    yield counts
    dynamo.backends.registry._BACKENDS.pop("counting_for_tests")
    dynamo.backends.registry._COMPILER_FNS.pop("counting_for_tests", None)


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def train(make_trainer, model, **options):
    torch.manual_seed(1)
    trainer = make_trainer(
        22, model=copy.deepcopy(model), num_train_epochs=2, eval_dataset=samples(6, seed=3), **options
    )
    trainer.train()
    return trainer


class LooksAtCount(Classifier):
    """Looks whether it is given the count, and returns a mean all the same."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        is_told = num_items_in_batch is not None and num_items_in_batch.dim() == 0
        return {**super().forward(x, labels), "is_told": is_told}


@pytest.mark.parametrize("kind", [Classifier, CountedSum, IgnoresCount, LooksAtCount])
def test_a_compiled_run_gives_the_bits_of_an_uncompiled_one(make_trainer, kind):
    torch.manual_seed(0)
    model = kind(dropout=0.2)
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch", "prediction_loss_only": True}
    plain = train(make_trainer, model, **options)
    compiled = train(make_trainer, model, torch_compile=True, torch_compile_backend="eager", **options)
    losses = [[e.get("loss", e.get("eval_loss")) for e in t.state.log_history] for t in (plain, compiled)]
    assert losses[0] == losses[1]
    assert list(weights(compiled)) == list(weights(plain))
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(compiled).items())


def test_training_and_evaluation_run_what_the_backend_made(make_trained, counting_backend):
    trainer = make_trained(20, torch_compile_backend="counting_for_tests", eval_dataset=samples(4))
    assert counting_backend["calls"] == 5
    trainer.evaluate()
    assert counting_backend["calls"] == 6
    trainer.predict(samples(4))
    graphs = counting_backend["graphs"]
    assert counting_backend["calls"] == 7
    trainer.evaluate()
    assert counting_backend["graphs"] == graphs


def test_a_micro_batch_whose_operations_are_counted_is_not_compiled_and_later_ones_are(make_trained, counting_backend):
    make_trained(20, torch_compile_backend="counting_for_tests", count_flops=True)
    assert counting_backend["calls"] == 4


def test_displays_hear_of_the_call_that_compiles_and_of_no_other(make_trained, counting_backend):
    heard = []

    class Listens(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            active_clock().on_doing = heard.append

    trainer = make_trained(20, callbacks=[Listens()], torch_compile_backend="counting_for_tests")
    assert heard[:2] == ["compiling", ""]
    assert heard.count("compiling") == 1
    heard.clear()
    trainer.train()
    assert "compiling" not in heard


def test_outside_the_trainer_the_model_is_not_compiled(make_trained, counting_backend):
    trainer = make_trained(8, torch_compile_backend="counting_for_tests")
    calls = counting_backend["calls"]
    trainer.model(samples(1)[0]["x"])
    assert counting_backend["calls"] == calls
    assert type(trainer.model) is Classifier
    assert trainer.model_wrapped is trainer.model


def test_a_model_is_not_compiled_any_more_after_an_exception(make_trainer, counting_backend):
    class Fails(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            raise KeyError("on purpose")

    trainer = make_trainer(8, trainer_class=Fails, torch_compile_backend="counting_for_tests")
    with pytest.raises(KeyError):
        trainer.train()
    assert trainer.model._compiled_call_impl is None


def test_a_call_that_the_user_compiled_is_the_users_again_afterwards(make_trainer, model):
    model.compile(backend="eager")
    own = model._compiled_call_impl
    make_trainer(8, model=model, torch_compile_backend="aot_eager").train()
    assert model._compiled_call_impl is own


class Statistics(CountedSum):
    """Counts batches in a buffer, and draws random numbers."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, labels=None, num_items_in_batch=None):
        return super().forward(self.norm(x), labels, num_items_in_batch)


def test_finding_out_what_a_loss_is_divided_by_leaves_no_trace(make_trainer):
    torch.manual_seed(0)
    model = Statistics()
    plain = train(make_trainer, model)
    compiled = train(make_trainer, model, torch_compile_backend="eager")
    assert compiled.model.norm.num_batches_tracked == plain.model.norm.num_batches_tracked
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(compiled).items())


def test_saved_weights_have_the_models_own_names(make_trained, tmp_path):
    from safetensors.torch import load_file

    trainer = make_trained(8, torch_compile_backend="eager")
    trainer.save_model(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(Classifier().state_dict())
    assert not any("_orig_mod" in path.read_text(errors="replace") for path in (tmp_path / "saved").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torch_compile_backend": "indictor"}, r"torch_compile_backend='indictor' is not known; torch has .*inductor"),
        (
            {"torch_compile_mode": "fastest"},
            "torch_compile_mode='fastest' is not known; choose one of .*max-autotune",
        ),
        (
            {"torch_compile_mode": "max-autotune", "torch_compile_backend": "eager"},
            "torch_compile_backend='eager' would ignore it; leave one of them out",
        ),
    ],
)
def test_a_backend_or_mode_that_torch_has_not_is_refused_at_construction(make_trainer, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(4, **options)


def test_an_error_lists_the_backends_that_torch_names():
    with pytest.raises(ValueError, match=", ".join(dynamo.list_backends())):
        Compilation("none")


def test_a_model_that_was_compiled_into_another_module_is_refused(make_trainer, model):
    with pytest.raises(ValueError, match=r"model is what torch.compile\(\) returned.*set torch_compile=True"):
        make_trainer(4, model=torch.compile(model, backend="eager"))


@pytest.mark.cuda
def test_a_run_compiled_by_inductor_learns_as_an_uncompiled_one(make_trainer, model):
    plain = train(make_trainer, model, use_cpu=False)
    compiled = train(make_trainer, model, use_cpu=False, torch_compile=True)
    for name, value in weights(compiled).items():
        torch.testing.assert_close(value, weights(plain)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "eager_debug", "eager_noexcept", "pre_dispatch_eager", "ts"])
def test_a_backend_that_draws_dropout_again_is_refused_with_activation_checkpointing(make_trainer, backend):
    with pytest.raises(ValueError, match=f"backend='{backend}' computes activations again with another dropout mask"):
        make_trainer(8, activation_checkpointing=True, torch_compile_backend=backend)


def test_compiled_and_checkpointed_layers_have_the_gradients_of_the_same_dropout(make_trained):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4)) for _ in range(2)])
            self.head = nn.Linear(8, 3)

        def forward(self, x, labels=None):
            for layer in self.layers:
                x = layer(x)
            return {"loss": nn.functional.cross_entropy(self.head(x), labels)}

    ends = []
    for checkpointing in (False, True):
        options = {"activation_checkpointing": checkpointing, "torch_compile_backend": "aot_eager"}
        trainer = make_trained(8, model=Layers(), **options)
        ends.append(trainer.model.state_dict().values())
    assert all(map(torch.equal, *ends))
