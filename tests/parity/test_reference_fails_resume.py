"""Faults of the reference's checkpoints: what is lost, repeated, or taken from where it should not be."""

import json
import shutil

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, build, run, same_tensors, warnings_of
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.reference_fails

SAVING = {"save_strategy": "steps", "save_steps": 1}


def finished(side, scenario, folder):
    return run(side, scenario, folder / side.name)


def resume(side, scenario, folder, step, **changes):
    """Go on from the checkpoint of `step`, with some arguments changed, and save nothing."""
    again = Scenario(
        scenario.model,
        scenario.train,
        scenario.evaluation,
        {**scenario.arguments, "save_strategy": "no", **changes},
        scenario.options,
        scenario.callbacks,
    )
    checkpoint = folder / side.name / f"checkpoint-{step}"
    return run(side, again, folder / f"{side.name}-{step}", resume_from_checkpoint=str(checkpoint))


def test_resuming_a_finished_run_does_nothing(tmp_path):
    scenario = Scenario(
        models.Mlp, data.classes(), arguments={**SAVING, "max_steps": 7, "lr_scheduler_type": "constant"}
    )
    for side, steps in ((REFERENCE, 8), (OURS, 7)):
        whole = finished(side, scenario, tmp_path)
        again = run(side, scenario, tmp_path / side.name, resume_from_checkpoint=True)
        assert again.output.global_step == steps
        assert same_tensors(whole.weights, again.weights) == (side is OURS)
        assert (tmp_path / side.name / "checkpoint-8").exists() == (side is REFERENCE)


class Noisy:
    """A collator that draws random numbers."""

    def __call__(self, samples):
        x = torch.stack([sample["x"] for sample in samples])
        return {"x": x + 0.3 * torch.randn_like(x), "labels": torch.tensor([s["labels"] for s in samples])}


def test_random_collation_goes_on_after_a_resume(tmp_path):
    scenario = Scenario(models.Mlp, data.classes(), arguments=SAVING, options={"data_collator": Noisy()})
    for side in (REFERENCE, OURS):
        whole = finished(side, scenario, tmp_path)
        again = resume(side, scenario, tmp_path, 3)
        assert same_tensors(whole.weights, again.weights) == (side is OURS)


# From Python 3.12 on a fork beside other threads warns; torch's own threads are idle here.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_random_collation_does_not_depend_on_the_number_of_workers(tmp_path):
    for side in (REFERENCE, OURS):
        losses = []
        for workers in (0, 1):
            arguments = {"dataloader_num_workers": workers, "num_train_epochs": 1}
            scenario = Scenario(models.Mlp, data.classes(), None, arguments, {"data_collator": Noisy()})
            losses.append(run(side, scenario, tmp_path / f"{side.name}-{workers}").losses)
        assert (losses[0] == losses[1]) == (side is OURS)


def test_the_order_of_the_data_follows_the_arguments_alone(tmp_path):
    """The reference takes the seed that torch was given last, in whatever code."""
    for side in (REFERENCE, OURS):
        orders = []
        for seed in (1, 2):
            outcome = build(side, Scenario(models.Mlp, data.classes()), tmp_path / f"{side.name}-{seed}")
            torch.manual_seed(seed)
            with warnings_of(side):
                outcome.trainer.train()
            orders.append(outcome.batches.train)
        is_same = all(same_tensors(*batches) for batches in zip(*orders, strict=True))
        assert is_same == (side is OURS)


def test_another_batch_size_at_a_resume_goes_on_with_the_next_sample(tmp_path):
    scenario = Scenario(models.Linear, data.regression(), arguments={**SAVING, "num_train_epochs": 1})
    for side in (REFERENCE, OURS):
        before = finished(side, scenario, tmp_path).batches.train[:2]  # two batches of 4
        again = resume(side, scenario, tmp_path, 2, per_device_train_batch_size=2)
        used = torch.cat([batch["x"] for batch in (*before, *again.batches.train)])
        each_once = used.shape[0] == 18 and used.unique(dim=0).shape[0] == 18
        assert each_once == (side is OURS)
        assert again.trainer.state.epoch == 1.0
        # After 8 of 18 samples the next 2 bring the epoch to 5 batches of 9; the reference's goes back.
        assert again.trainer.state.log_history[2]["epoch"] == (5 / 9 if side is OURS else 3 / 9)


def rates_from(outcome, step):
    """Return the learning rates that were logged of the steps after one."""
    history = outcome.trainer.state.log_history
    return [entry["learning_rate"] for entry in history if "learning_rate" in entry and entry["step"] > step]


def test_a_changed_learning_rate_is_applied_at_a_resume(tmp_path):
    """The reference goes on with the rate in the checkpoint, and says nothing."""
    scenario = Scenario(models.Mlp, data.classes(), arguments=SAVING)
    for side in (REFERENCE, OURS):
        finished(side, scenario, tmp_path)
        changed = resume(side, scenario, tmp_path, 4, learning_rate=0.5)
        base = 0.05 if side is REFERENCE else 0.5
        assert rates_from(changed, 4) == pytest.approx([base * left / 10 for left in range(6, 0, -1)])


def test_a_run_that_was_made_longer_does_not_begin_at_the_last_rate_of_the_shorter(tmp_path):
    scenario = Scenario(models.Mlp, data.classes(), arguments=SAVING)
    for side in (REFERENCE, OURS):
        finished(side, scenario, tmp_path)
        longer = resume(side, scenario, tmp_path, 10, num_train_epochs=4)
        expected = [0.05 * left / 20 for left in range(10, 0, -1)]
        if side is REFERENCE:
            expected[0] = 0.0
        assert rates_from(longer, 10) == pytest.approx(expected)


def test_another_weight_decay_at_a_resume_is_applied(tmp_path):
    scenario = Scenario(models.Mlp, data.classes(), arguments=SAVING)
    for side in (REFERENCE, OURS):
        finished(side, scenario, tmp_path)
        changed = resume(side, scenario, tmp_path, 4, weight_decay=0.3)
        assert changed.trainer.optimizer.param_groups[0]["weight_decay"] == (0.0 if side is REFERENCE else 0.3)


def test_a_stream_goes_on_where_it_was_beyond_its_first_pass(tmp_path):
    """Three steps a pass, resumed in the second one."""
    scenario = Scenario(models.Mlp, data.Stream(data.classes(12)), arguments={**SAVING, "max_steps": 8})
    for side in (REFERENCE, OURS):
        whole = finished(side, scenario, tmp_path)
        again = resume(side, scenario, tmp_path, 5)
        assert same_tensors(whole.weights, again.weights) == (side is OURS)
        assert (again.trainer.state.epoch == whole.trainer.state.epoch) == (side is OURS)


def test_a_missing_optimizer_is_an_error(tmp_path):
    arguments = {**SAVING, "lr_scheduler_type": "linear"}
    scenario = Scenario(models.Mlp, data.classes(), arguments=arguments)
    finished(REFERENCE, scenario, tmp_path)
    (tmp_path / "reference" / "checkpoint-4" / "optimizer.pt").unlink()
    again = resume(REFERENCE, scenario, tmp_path, 4)
    assert again.trainer.state.log_history[4]["learning_rate"] == 0.05  # as at the very beginning

    finished(OURS, scenario, tmp_path)
    (tmp_path / "ours" / "checkpoint-4" / "optimizer.safetensors").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-4.*optimizer.safetensors"):
        resume(OURS, scenario, tmp_path, 4)


def damage(folder, how):
    """Leave the newest checkpoint as a crash could."""
    if how == "empty":
        for path in folder.iterdir():
            path.unlink()
    elif how == "state":
        (folder / "trainer_state.json").unlink()
    else:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("how", "fault"), [("empty", ValueError), ("state", FileNotFoundError), ("weights", SafetensorError)]
)
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, how, fault, caplog):
    scenario = Scenario(models.Mlp, data.classes(), arguments={"save_strategy": "steps", "save_steps": 3})
    for side in (REFERENCE, OURS):
        whole = finished(side, scenario, tmp_path)
        shutil.rmtree(tmp_path / side.name / "checkpoint-10")
        damage(tmp_path / side.name / "checkpoint-9", how)
        if side is REFERENCE:
            with pytest.raises(fault):
                run(side, scenario, tmp_path / side.name, resume_from_checkpoint=True)
            continue
        again = run(side, scenario, tmp_path / side.name, resume_from_checkpoint=True)
        assert same_tensors(whole.weights, again.weights)
        assert again.trainer.state.log_history[-1]["step"] == 10
        assert "checkpoint-9" in caplog.text


def test_the_end_of_an_epoch_is_made_up_after_a_resume(tmp_path):
    """A checkpoint of an epoch's last step is written before that epoch is evaluated."""
    scenario = Scenario(
        models.Mlp,
        data.classes(),
        data.classes(9, seed=8),
        {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "epoch"},
    )
    for side, evaluated in ((REFERENCE, [10]), (OURS, [5, 10])):
        finished(side, scenario, tmp_path)
        history = resume(side, scenario, tmp_path, 5).trainer.state.log_history
        assert [entry["step"] for entry in history if "eval_loss" in entry] == evaluated


class Tied(nn.Module):
    """Two layers that share their weight."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x, labels=None):
        logits = self.last(F.gelu(self.first(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_plain_model_with_tied_weights_is_saved_and_resumed(tmp_path):
    scenario = Scenario(Tied, data.classes(), arguments={"save_strategy": "steps", "save_steps": 4})
    with pytest.raises(RuntimeError, match="share memory"):
        finished(REFERENCE, scenario, tmp_path)
    assert (tmp_path / "reference" / "checkpoint-4").exists()  # half a checkpoint

    whole = finished(OURS, scenario, tmp_path)
    again = resume(OURS, scenario, tmp_path, 4)
    assert same_tensors(whole.weights, again.weights)
    assert again.trainer.model.last.weight is again.trainer.model.first.weight


def test_no_file_of_a_checkpoint_needs_pickle(tmp_path):
    scenario = Scenario(models.Mlp, data.classes(), arguments={"save_strategy": "epoch", "num_train_epochs": 1})
    found = {}
    for side in (REFERENCE, OURS):
        folder = finished(side, scenario, tmp_path).folder / "checkpoint-5"
        found[side.name] = {path.suffix for path in folder.iterdir()}
    assert {".pt", ".pth", ".bin"} <= found["reference"]
    assert found["ours"] == {".json", ".safetensors"}


def test_the_state_file_is_strict_json(tmp_path):
    def nan_metric(prediction):
        return {"score": float("nan")}

    def refuse(name):
        raise ValueError(name)

    scenario = Scenario(
        models.Mlp,
        data.classes(),
        data.classes(9, seed=8),
        {"save_strategy": "epoch", "eval_strategy": "epoch", "num_train_epochs": 1},
        {"compute_metrics": nan_metric},
    )
    texts = {
        side.name: (finished(side, scenario, tmp_path).folder / "checkpoint-5" / "trainer_state.json").read_text()
        for side in (REFERENCE, OURS)
    }
    with pytest.raises(ValueError, match="NaN"):
        json.loads(texts["reference"], parse_constant=refuse)
    assert json.loads(texts["ours"], parse_constant=refuse)["global_step"] == 5


def test_an_unknown_entry_of_the_state_is_passed_over(tmp_path, caplog):
    import transformers

    import tr_core

    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 3, "of_a_later_version": 1}))
    with pytest.raises(TypeError, match="of_a_later_version"):
        transformers.TrainerState.load_from_json(str(path))
    assert tr_core.TrainerState.load_from_json(path).global_step == 3
    assert "of_a_later_version" in caplog.text


class Counts:
    """A callback with a state, which the reference wants in its own form and ours in torch's."""

    def __init__(self, by=1):
        self.by, self.count = by, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += self.by

    def state(self):
        return {"args": {"by": self.by}, "attributes": {"count": self.count}}

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_two_callbacks_of_one_class_keep_their_states(tmp_path):
    from transformers.trainer_callback import ExportableState

    for side in (REFERENCE, OURS):
        bases = (Counts, side.callback, ExportableState) if side is REFERENCE else (Counts, side.callback)
        counts = type("Counter", bases, {})
        scenario = Scenario(
            models.Mlp,
            data.classes(),
            arguments={**SAVING, "restore_callback_states_from_checkpoint": True},
            callbacks=lambda counts=counts: [counts(1), counts(10)],
        )
        finished(side, scenario, tmp_path)
        again = resume(side, scenario, tmp_path, 5)
        found = [c.count for c in again.trainer.callback_handler.callbacks if isinstance(c, Counts)]
        assert found == ([10, 100] if side is OURS else [5, 50])  # the reference's began again from 0


def test_a_callback_of_the_reference_keeps_its_state_and_what_the_resumed_run_gives_it(tmp_path):
    from transformers.trainer_callback import ExportableState

    class State(ExportableState):
        def __init__(self, by=1):
            self.by, self.count = by, 0

        on_step_end, state = Counts.on_step_end, Counts.state

    for side, expected in ((REFERENCE, (10, 1, False)), (OURS, (5 + 5 * 3, 3, True))):
        counts = type("Counter", (State, side.callback), {})
        arguments = {**SAVING, "restore_callback_states_from_checkpoint": True}
        scenario = Scenario(models.Mlp, data.classes(), arguments=arguments, callbacks=lambda c=counts: [c()])
        finished(side, scenario, tmp_path)
        given = counts(3)
        scenario = Scenario(models.Mlp, data.classes(), arguments=arguments, callbacks=lambda g=given: [g])
        again = resume(side, scenario, tmp_path, 5)
        (found,) = [c for c in again.trainer.callback_handler.callbacks if isinstance(c, State)]
        assert (found.count, found.by, found is given) == expected


def test_the_last_checkpoint_stays_beside_the_best_one(tmp_path):
    """The reference deletes it at the end of the run: resuming the finished run then trains from the best one on."""
    evaluation = data.classes(9, seed=8)
    arguments = {
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "save_total_limit": 1,
        "metric_for_best_model": "epoch",
        "greater_is_better": False,  # the first one is the best
    }
    for side, kept in ((REFERENCE, [5]), (OURS, [5, 10])):
        scores = iter([1.0, 2.0])
        options = {"compute_metrics": lambda prediction, scores=scores: {"epoch": next(scores)}}
        finished(side, Scenario(models.Mlp, data.classes(), evaluation, arguments, options), tmp_path)
        folders = (tmp_path / side.name).glob("checkpoint-*")
        assert sorted(int(path.name.removeprefix("checkpoint-")) for path in folders) == kept
