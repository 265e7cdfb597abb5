"""A run of the reference is gone on with by ours as by the reference itself: with the same data, logs and weights."""

import parity_data as data
import parity_models as models
import pytest
import torch
import transformers
from parity_foreign import begun, both_go_on, resumed
from parity_harness import OURS, REFERENCE, Scenario, assert_same, run, same_tensors
from transformers.trainer_callback import ExportableState

EVALUATION = data.classes(9, seed=8)
# Five batches a pass and two passes: in the middle of the first, at the boundary, in the middle of the second.
STEPS = (2, 5, 8)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_both_go_on_alike_from_every_step(tmp_path, accumulation):
    arguments = {"gradient_accumulation_steps": accumulation, "weight_decay": 0.1}
    scenario = Scenario(models.Mlp, data.classes(), arguments=arguments)
    whole = begun(scenario, tmp_path)
    for step in range(1, whole.trainer.state.max_steps):
        outcomes = [resumed(side, scenario, tmp_path, step) for side in (REFERENCE, OURS)]
        assert_same(*outcomes)
        assert same_tensors(whole.weights, outcomes[1].weights)


@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_scheduler_type": "linear", "warmup_steps": 4},
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.25},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"lr_scheduler_type": "polynomial"},
    ],
)
def test_the_schedule_goes_on(tmp_path, schedule):
    both_go_on(Scenario(models.Mlp, data.classes(), arguments=schedule), tmp_path, STEPS)


def test_a_schedule_that_follows_evaluations_goes_on(tmp_path):
    arguments = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "score",
        "greater_is_better": True,
    }
    options = {"compute_metrics": lambda prediction: {"score": 0.5}}  # never better: lowered every time
    _, ours = both_go_on(Scenario(models.Mlp, data.classes(), EVALUATION, arguments, options), tmp_path, STEPS)
    rates = [entry["learning_rate"] for entry in ours.history if "learning_rate" in entry]
    assert rates[-1] < 0.05 / 2**7


@pytest.mark.parametrize(
    "settings", [{"patience": 0, "factor": 0.5, "smooth": True, "window_size": 3}, {"patience": 2}]
)
def test_the_greedy_schedule_goes_on(tmp_path, settings):
    arguments = {
        "lr_scheduler_type": "greedy",
        "lr_scheduler_kwargs": {"min_lr": 1e-3, "max_lr": 1.0, **settings},
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    both_go_on(Scenario(models.Mlp, data.classes(), EVALUATION, arguments), tmp_path, STEPS)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optim": "adamw_torch", "weight_decay": 0.1},
        {"optim": "adamw_torch_fused"},
        {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=True"},
        {"optim": "adagrad"},
        {"optim": "rmsprop", "optim_args": "momentum=0.5"},
    ],
)
def test_the_optimizer_goes_on(tmp_path, optimizer):
    both_go_on(Scenario(models.Mlp, data.classes(), arguments=optimizer), tmp_path, STEPS)


def bert_for_masked_tokens():
    """Return a model of one layer whose last weight, and its bias, is tied to the first, without dropout."""
    config = transformers.BertConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def test_adafactor_goes_on(tmp_path):
    scenario = Scenario(models.Mlp, data.classes(), arguments={"optim": "adafactor", "learning_rate": 0.01})
    whole = begun(scenario, tmp_path)
    for step in STEPS:
        reference, ours = (resumed(side, scenario, tmp_path, step) for side in (REFERENCE, OURS))
        assert_same(reference, ours, but=["history", "events", "weights", "optimizer"])
        assert ours.losses == pytest.approx(reference.losses, rel=1e-6)
        for name, weight in whole.weights.items():
            torch.testing.assert_close(ours.weights[name], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "train", "accumulation"),
    [
        (models.gpt2, data.tokens, 2),
        (models.llama, data.tokens, 2),
        (models.bert_classifier, data.sentences, 1),  # accumulated, the reference divides its loss by too little
        (bert_for_masked_tokens, data.tokens, 1),
    ],
)
def test_models_of_the_library_go_on(tmp_path, model, train, accumulation):
    arguments = {"gradient_accumulation_steps": accumulation, "learning_rate": 0.01, "num_train_epochs": 3}
    scenario = Scenario(model, train(), arguments=arguments)
    whole = begun(scenario, tmp_path)
    for step in range(1, whole.trainer.state.max_steps):
        outcomes = [resumed(side, scenario, tmp_path, step) for side in (REFERENCE, OURS)]
        assert_same(*outcomes)
        assert same_tensors(whole.weights, outcomes[1].weights)


class StatesAtForward:
    """Note torch's random state at each forward of a training model."""

    def __init__(self):
        self.states = []

    def watch(self, model):
        model.register_forward_pre_hook(
            lambda *_: self.states.append(torch.get_rng_state()) if model.training else None
        )
        return model


def test_the_dropout_of_the_pass_that_was_begun_is_that_of_the_reference(tmp_path):
    """From the next pass on the reference's loader draws from the stream that dropout uses, and ours does not."""
    begun(Scenario(models.dropping_mlp, data.classes()), tmp_path)
    for step, same in ((2, 3), (7, 3), (8, 2)):  # steps that are left in the pass
        seen, losses = [], []
        for side in (REFERENCE, OURS):
            states = StatesAtForward()
            scenario = Scenario(lambda states=states: states.watch(models.dropping_mlp()), data.classes())
            losses.append(resumed(side, scenario, tmp_path, step).losses)
            seen.append(states.states)
        assert len(seen[0]) == len(seen[1]) == 10 - step
        assert all(torch.equal(*pair) for pair in zip(seen[0][:same], seen[1][:same], strict=True))
        assert losses[0][: step + same] == losses[1][: step + same]
        if step == 2:
            assert not torch.equal(seen[0][same], seen[1][same])


@pytest.mark.parametrize("step", [4, 6])
def test_early_stopping_and_the_best_model_go_on(tmp_path, step):
    """The best is before the checkpoint, what stops the run is after it."""
    scores = [0.1, 0.9, 0.3, 0.2, 0.4, 0.3, 0.2]
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": True,
        "save_strategy": "steps",
        "save_steps": 1,
    }

    def scenario(side, first=0, **changes):
        left = iter(scores[first:])
        return Scenario(
            models.Mlp,
            data.classes(),
            EVALUATION,
            {**arguments, **changes},
            {"compute_metrics": lambda prediction: {"score": next(left)}},
            lambda: [side.early_stopping(early_stopping_patience=5)],
        )

    assert begun(scenario(REFERENCE), tmp_path).output.global_step == 7
    outcomes = []
    for side in (REFERENCE, OURS):
        folder = tmp_path / f"{side.name}-{step}"
        again = scenario(side, step, restore_callback_states_from_checkpoint=True)
        checkpoint = tmp_path / "begun" / f"checkpoint-{step}"
        outcomes.append(run(side, again, folder, resume_from_checkpoint=str(checkpoint)))
    # The reference begins with the flags of the save, which the first step clears.
    assert_same(*outcomes, but=["events"])
    assert outcomes[1].output.global_step == 7
    assert outcomes[1].trainer.state.best_global_step == 2


def test_an_open_log_window_begins_anew_in_both(tmp_path):
    """The reference does not save it."""
    both_go_on(Scenario(models.Mlp, data.classes(), arguments={"logging_steps": 3}), tmp_path, (4, 5, 7))


def test_evaluations_and_logs_of_whole_passes_go_on(tmp_path):
    arguments = {"logging_strategy": "epoch", "eval_strategy": "epoch", "num_train_epochs": 2}
    both_go_on(Scenario(models.Mlp, data.classes(), EVALUATION, arguments), tmp_path, (3, 5, 7))


def test_a_checkpoint_of_the_end_of_a_pass_goes_on(tmp_path):
    arguments = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    both_go_on(Scenario(models.Mlp, data.classes(), EVALUATION, arguments), tmp_path, (5,))


def test_ignoring_the_data_already_used_is_the_same(tmp_path):
    scenario = Scenario(models.Mlp, data.classes(), arguments={"ignore_data_skip": True})
    begun(scenario, tmp_path)
    assert_same(*(resumed(side, scenario, tmp_path, 3) for side in (REFERENCE, OURS)))


def test_a_number_of_steps_and_a_longer_run_end_at_the_same_step(tmp_path):
    scenario = Scenario(models.Mlp, data.classes(), arguments={"max_steps": 7})
    begun(scenario, tmp_path)
    for changes in ({}, {"max_steps": 13}):
        outcomes = [resumed(side, scenario, tmp_path, 4, **changes) for side in (REFERENCE, OURS)]
        assert_same(*outcomes)
        assert outcomes[1].output.global_step == changes.get("max_steps", 7)


def test_counts_of_tokens_and_operations_go_on(tmp_path):
    arguments = {"include_num_input_tokens_seen": "all", "learning_rate": 0.01}
    scenario = Scenario(models.llama, data.tokens(), arguments=arguments)
    begun(scenario, tmp_path)
    reference, ours = (resumed(side, scenario, tmp_path, 2) for side in (REFERENCE, OURS))
    for name in ("num_input_tokens_seen", "total_flos"):
        assert getattr(ours.trainer.state, name) == getattr(reference.trainer.state, name) > 0


def test_a_finished_run_stays_as_it_is(tmp_path):
    whole = begun(Scenario(models.Mlp, data.classes()), tmp_path)
    again = resumed(OURS, Scenario(models.Mlp, data.classes()), tmp_path, 10)
    assert again.output.global_step == 10
    assert same_tensors(whole.weights, again.weights)
    assert again.batches.train == []


class Counts(ExportableState):
    """Counts steps, with a state in the form of the reference."""

    def __init__(self, by=1):
        self.by, self.count = by, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += self.by

    def state(self):
        return {"args": {"by": self.by}, "attributes": {"count": self.count}}


def test_a_callback_of_the_reference_keeps_its_state_and_what_the_resumed_run_gives_it(tmp_path):
    counts = type("Counter", (Counts, OURS.callback), {})
    arguments = {"save_strategy": "steps", "save_steps": 1, "restore_callback_states_from_checkpoint": True}
    run(OURS, Scenario(models.Mlp, data.classes(), None, arguments, {}, lambda: [counts()]), tmp_path)
    given = counts(3)
    again = Scenario(models.Mlp, data.classes(), None, arguments, {}, lambda: [given])
    outcome = run(OURS, again, tmp_path / "again", resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert given in outcome.trainer.callback_handler.callbacks
    assert (given.count, given.by) == (5 + 5 * 3, 3)
