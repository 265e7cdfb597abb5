"""TF32 for a run, evaluation in 16 bits, and the weights as they were afterwards."""

import pytest
import torch
from support.callbacks import Looks
from support.data import samples
from support.models import Classifier
from torch import nn

from tr_core import TrainerCallback
from tr_core.runtime.run_context import has_tf32, in_precision, tf32


def precisions():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


# TF32


def test_tf32_on_a_device_without_it_is_an_error_in_words(make_trainer):
    with pytest.raises(ValueError, match=r"tf32=True needs an NVIDIA GPU of compute capability 8.0 or later, .* cpu"):
        make_trainer(8, tf32=True)


@pytest.mark.filterwarnings("ignore:Please use the new API settings")  # torch 2.9, of the test's own setting
@pytest.mark.parametrize(("allow", "during"), [(None, ("high", True)), (False, ("highest", False))])
def test_tf32_is_forbidden_or_left_alone_while_the_trainer_computes_and_put_back(make_trained, allow, during):
    torch.set_float32_matmul_precision("high")
    try:
        watch = Looks(precisions)
        trainer = make_trained(8, tf32=allow, eval_dataset=samples(4), callbacks=[watch])
        assert precisions() == ("high", True)
        trainer.evaluate()
        assert precisions() == ("high", True)
        assert watch.seen == [during] * 3
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tf32_is_allowed_within_the_block_and_put_back_after_an_exception():
    before, during = precisions(), []

    def fail():
        with tf32(True):
            during.append(precisions())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert during == [("high", True)]
    assert precisions() == before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch names it since 2.9")
def test_a_precision_that_was_set_by_its_newer_name_is_put_back_too():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with tf32(False):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_which_devices_have_tf32(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for capability, has in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_tf32(torch.device("cuda")) is has
    assert not has_tf32(torch.device("mps"))


# Evaluation in 16 bits


DTYPES = {"bf16_full_eval": torch.bfloat16, "fp16_full_eval": torch.float16}


class Tied(Classifier):
    """Has a shared weight, a buffer of every kind, and a view of a weight."""

    def __init__(self):
        super().__init__()
        self.again = self.layers[0]
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("count", torch.tensor(3))
        self.part = nn.Parameter(self.layers[3].weight.data[0])
        self.seen = []

    def forward(self, x, labels=None):
        labels_dtype = None if labels is None else labels.dtype
        self.seen.append((x.dtype, self.layers[0].weight.dtype, self.mean.dtype, self.count.dtype, labels_dtype))
        return super().forward(x + self.mean, labels)


class Weights(TrainerCallback):
    def __init__(self):
        self.dtypes = []

    def on_evaluate(self, args, state, control, model, **kwargs):
        self.dtypes.append(next(model.parameters()).dtype)


@pytest.fixture
def tied():
    torch.manual_seed(0)
    return Tied()


@pytest.mark.parametrize("option", DTYPES)
def test_an_evaluation_outside_training_computes_in_16_bits_throughout(make_trainer, tied, option):
    trainer = make_trainer(8, model=tied, eval_dataset=samples(4), **{option: True})
    before = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    identities = [id(parameter) for parameter in tied.parameters()]
    metrics = trainer.evaluate()
    output = trainer.predict(samples(4))
    dtype = DTYPES[option]
    assert set(tied.seen) == {(dtype, dtype, dtype, torch.int64, torch.int64)}
    assert output.predictions.dtype == "float32" if dtype is torch.bfloat16 else "float16"
    assert metrics["eval_loss"] == pytest.approx(output.metrics["test_loss"])
    after = tied.state_dict()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items())
    assert [id(parameter) for parameter in tied.parameters()] == identities
    assert tied.part.data_ptr() == tied.layers[3].weight.data_ptr()


def test_the_loss_is_that_of_a_model_that_was_cast(make_trainer, model):
    trainer = make_trainer(8, model=model, eval_dataset=samples(4), bf16_full_eval=True)
    found = trainer.evaluate()["eval_loss"]
    rows = samples(4)
    cast = Classifier()
    cast.load_state_dict(model.state_dict())
    cast.to(torch.bfloat16)
    x, labels = torch.stack([r["x"] for r in rows]), torch.stack([r["labels"] for r in rows])
    with torch.no_grad():
        expected = cast(x.to(torch.bfloat16), labels)["loss"]
    assert found == expected.item()


def test_inside_training_the_weights_keep_their_type(make_trainer, tied):
    weights = Weights()
    options = {"eval_strategy": "epoch", "eval_dataset": samples(4), "callbacks": [weights]}
    make_trainer(8, model=tied, bf16_full_eval=True, **options).train()
    assert weights.dtypes == [torch.float32]
    assert {seen[:2] for seen in tied.seen} == {(torch.float32, torch.float32)}


def test_callbacks_after_an_evaluation_find_the_weights_as_they_are(make_trainer, tied):
    weights = Weights()
    make_trainer(8, model=tied, bf16_full_eval=True, eval_dataset=samples(4), callbacks=[weights]).evaluate()
    assert weights.dtypes == [torch.float32]


def test_the_weights_are_back_after_an_exception(make_trainer, tied):
    before = [parameter.clone() for parameter in tied.parameters()]

    class Fails(TrainerCallback):
        def on_prediction_step(self, args, state, control, model, **kwargs):
            assert next(model.parameters()).dtype is torch.bfloat16
            raise KeyError("on purpose")

    trainer = make_trainer(8, model=tied, bf16_full_eval=True, eval_dataset=samples(4), callbacks=[Fails()])
    with pytest.raises(KeyError):
        trainer.evaluate()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tied.parameters(), before, strict=True))
    assert not tied._forward_pre_hooks


def test_training_continues_as_if_nothing_had_been_evaluated(make_trainer, model):
    trainer = make_trainer(20, model=model, bf16_full_eval=True, eval_dataset=samples(4))
    trainer.evaluate()
    trainer.train()
    evaluated = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(0)
    other = Classifier()
    make_trainer(20, model=other).train()
    assert all(torch.equal(evaluated[name], value) for name, value in other.state_dict().items())


@pytest.mark.cuda
def test_a_device_holds_only_the_cast_weights_meanwhile(tied):
    model = nn.Sequential(tied, nn.Linear(1024, 1024)).to("cuda")
    tied.part.data = tied.layers[3].weight.data[0]
    before = {name: tensor.clone().cpu() for name, tensor in model.state_dict().items()}
    held = torch.cuda.memory_allocated()
    with in_precision(model, torch.bfloat16):
        assert torch.cuda.memory_allocated() < held - 1024 * 1024 * 2 + 2**16
    assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in model.state_dict().items())
    assert tied.part.data_ptr() == tied.layers[3].weight.data_ptr()


def test_inputs_of_the_loss_keep_their_type():
    seen = []

    class Regression(nn.Linear):
        def forward(self, x, labels=None):
            seen.append((x.dtype, labels.dtype))
            return super().forward(x)

    model = Regression(4, 1)
    with in_precision(model, torch.bfloat16, ["labels"]):
        model(x=torch.ones(2, 4), labels=torch.ones(2, 1))
        model(torch.ones(2, 4), labels=torch.ones(2, 1))
    assert seen == [(torch.bfloat16, torch.float32)] * 2
