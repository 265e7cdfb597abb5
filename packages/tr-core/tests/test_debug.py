"""Stop at the first module that is not finite, and say what led there."""

import pytest
import torch
from support.data import samples
from support.models import Classifier
from torch import nn

from tr_core import TrainerCallback
from tr_core.runtime.run_context import overflow_watch

WATCH = "underflow_overflow"


class Overflows(Classifier):
    """Gives infinity in its second layer from the third forward on."""

    def __init__(self):
        super().__init__()
        self.forwards = 0

    def forward(self, x, labels=None):
        self.forwards += 1
        if self.forwards == 3:
            with torch.no_grad():
                self.layers[0].bias.fill_(3e38)
                self.layers[3].weight.fill_(3e38)
        return super().forward(x, labels)


def test_a_run_stops_at_the_first_output_that_is_not_finite_and_shows_what_ran_before(make_trainer):
    model = Overflows()
    trainer = make_trainer(40, model=model, debug=WATCH)
    with pytest.raises(FloatingPointError) as caught:
        trainer.train()
    message = str(caught.value)
    assert message.startswith("output of layers.3 (Linear) not finite. The modules that ran last")
    lines = message.splitlines()
    assert [line for line in lines if not line.startswith(" ")][2:][-4:] == [
        "layers.0: Linear",
        "layers.1: Tanh",
        "layers.2: Dropout",
        "layers.3: Linear",
    ]
    assert "3.00e+38" in message
    assert lines[-1].endswith("inf output")
    assert trainer.state.global_step == 2


def test_a_weight_that_is_not_a_number_is_found_in_its_own_module():
    model = Classifier()
    model.layers[0].weight.data[0, 0] = float("nan")
    with overflow_watch(model), pytest.raises(FloatingPointError, match="weight weight and output of layers.0"):
        model(torch.ones(2, 8))


def test_about_twenty_modules_are_shown():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    model[39].bias.data.fill_(float("inf"))
    with overflow_watch(model), pytest.raises(FloatingPointError) as caught:
        model(torch.ones(1, 2))
    shown = [line for line in str(caught.value).splitlines() if line.endswith(": Linear")]
    assert shown[0] == "19: Linear"
    assert shown[-1] == "39: Linear"


def test_inputs_that_are_not_finite_do_not_stop_a_run():
    """A mask may well hold minus infinity."""

    class Masks(nn.Module):
        def forward(self, x, mask):
            return {"scores": torch.softmax(x + mask, -1), "pair": [x, (x,)]}

    mask = torch.tensor([0.0, float("-inf")])
    with overflow_watch(model := Masks()):
        model(torch.ones(2), mask=mask)


@pytest.mark.parametrize("fails", [False, True])
def test_the_watch_is_gone_after_training(make_trainer, fails):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            assert all(module._forward_hooks for module in model.modules())
            if fails:
                raise KeyError("on purpose")

    trainer = make_trainer(8, debug=WATCH, callbacks=[Fails()])
    if fails:
        with pytest.raises(KeyError):
            trainer.train()
    else:
        trainer.train()
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_watching_changes_no_number(make_trained, make_args):
    runs = []
    for debug in ("", WATCH):
        torch.manual_seed(0)
        trainer = make_trained(20, model=Classifier(dropout=0.3), debug=debug)
        runs.append([entry.get("loss") for entry in trainer.state.log_history])
    assert runs[0] == runs[1]


def test_a_compiled_model_cannot_be_watched(make_trainer):
    with pytest.raises(ValueError, match="debug='underflow_overflow' looks at what passes between modules"):
        make_trainer(8, debug=WATCH, torch_compile=True)


def test_counters_of_a_tpu_need_its_package(make_trainer, monkeypatch):
    monkeypatch.setattr("tr_core.runtime.run_context.find_spec", lambda name: None)  # it may be there
    with pytest.raises(ImportError, match="debug='tpu_metrics_debug' shows the counters of torch_xla"):
        make_trainer(8, debug="tpu_metrics_debug")


def test_counters_of_a_tpu_are_logged_after_every_evaluation(make_trainer, monkeypatch, heard):
    """torch_xla does not run here: a module of its name replaces it."""
    import sys
    from types import ModuleType

    metrics = ModuleType("torch_xla.debug.metrics")
    metrics.metrics_report = lambda: "Metric: CompileTime"
    for name in ("torch_xla", "torch_xla.debug"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__spec__ = object()
    monkeypatch.setitem(sys.modules, "torch_xla.debug.metrics", metrics)
    trainer = make_trainer(8, debug="tpu_metrics_debug", eval_dataset=samples(4), log_level="info")
    lines = heard("info")
    trainer.evaluate()
    assert lines == ["Metric: CompileTime"]
