"""What every backend does besides giving the numbers of one process: its promises, bfloat16, overflows, exports."""

from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file
from test_numbers import Network, Rows
from torch import nn
from variants import VARIANTS, run_on, shared

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_core.testing import check_strategy


def trainer_of(folder, options, callbacks=()):
    rows = [dict(row, labels=row["labels"].clamp(min=0)) for row in Rows(48).rows]
    quiet = {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "log_level": "error", "report_to": "none"}
    args = TrainingArguments(
        output_dir=folder, learning_rate=1e-2, logging_steps=1, max_steps=4, **{**quiet, **options}
    )
    return Trainer(Network(), args, train_dataset=rows, eval_dataset=rows[:7], callbacks=list(callbacks))


def small_network():
    """Return a network whose modules a plan for `Network` names."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(layers=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))))


def keep_promises(folder, options):
    strategy = trainer_of(folder, options).strategy
    of_tp = {"make": small_network, "consumes": False} if "tp_plan" in options else {}
    check_strategy(strategy, **of_tp)
    strategy.close()


@pytest.mark.row("promises")
def test_the_strategy_keeps_the_promises_of_the_seam(tmp_path, variant):
    options = {**VARIANTS[variant], "gradient_accumulation_steps": 2}
    if "transformer_layer_cls_to_wrap" in options.get("fsdp_config", {}):
        options["fsdp_config"] = {"min_num_params": 10}  # its model has no classes of layers
    run_on(variant, keep_promises, 2, str(tmp_path), options)


def train(folder, options):
    """Return the logged losses and the weights, and export the model."""
    trainer = trainer_of(folder, options)
    trainer.train()
    trainer.save_model(f"{folder}/out")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
    kept = {name: value.detach().cpu().clone() for name, value in weights.items()}
    trainer.strategy.close()
    return losses, kept


@pytest.mark.row("bf16")
def test_bfloat16_is_near_float32(tmp_path, variant, record_property):
    options = {**shared(variant, 12, 2), "bf16": True}
    if variant == "zero_0":
        with pytest.raises(Exception, match="stage=0 with bf16: use stage 1"):
            run_on(variant, train, 2, str(tmp_path), options)
        record_property("refused", "ZeRO stage 0 does not keep float32 parameters")
        return
    alone = train(str(tmp_path / "1"), {"per_device_train_batch_size": 12})
    losses, weights = run_on(variant, train, 2, str(tmp_path / "2"), options)[0]
    assert losses == pytest.approx(alone[0], abs=0.03)  # it has 8 bits
    assert losses != pytest.approx(alone[0], abs=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(value.float(), alone[1][name], rtol=0, atol=0.02)


@pytest.mark.row("export")
def test_the_model_is_saved_whole_in_a_file_that_a_plain_module_loads(tmp_path, variant):
    _, weights = run_on(variant, train, 2, str(tmp_path), shared(variant, 12, 2))[0]
    plain = Network()
    plain.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())


class Spoil(TrainerCallback):
    """Make the loss of the third step's first micro-batch infinite, on one rank."""

    hook = None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2 and args.process_index == args.world_size - 1:
            self.hook = model.register_forward_hook(
                lambda module, inputs, outputs: {**outputs, "loss": outputs["loss"] * float("inf")}
            )

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.hook is not None:
            self.hook.remove()


def leave_out(folder, options):
    trainer = trainer_of(folder, {**options, "on_nonfinite": "skip"}, [Spoil()])
    trainer.train()
    skipped = sum(entry.get("skipped_steps", 0) for entry in trainer.state.log_history if "loss" in entry)
    weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
    finite = all(bool(value.isfinite().all()) for value in weights.values())
    trainer.strategy.close()
    return skipped, finite


@pytest.mark.row("overflow")
def test_an_update_that_is_not_finite_is_left_out_on_all_ranks(tmp_path, variant):
    assert set(run_on(variant, leave_out, 2, str(tmp_path), shared(variant, 12, 2))) == {(1, True)}
