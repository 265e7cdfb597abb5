"""Which oracle knows what a run should give; what differs on purpose is in tr-core's docs/differences.md."""

from fuzz_configuration import LANGUAGE_MODELS, TAKES_COUNT
from fuzz_habits import HABITS


def by_hand_knows(run):
    """Whether the loop by hand can make a run."""
    draws_while_loading = run.data == "noisy"
    chooses = run.best or run.patience
    return not (draws_while_loading or chooses or run.options)


def transformers_is_right(run):
    """Whether transformers' Trainer makes the run that is described."""
    return not any(reason(run) for reason in REASONS)


def _loss_is_divided_otherwise(run):
    """It believes signatures: what takes the count is not divided by the micro-batches, what does not take it is."""
    if run.loss == "function":
        return True  # TypeError
    if run.loss == "parts":
        return True
    if run.loss == "function_looked":
        return True  # the signature has the count
    if run.model == "gpt2" and run.divides:
        return True  # first labels are counted as targets
    if run.loss == "smoothing":
        return run.kind != "sentences" and run.kind != "tokens"  # it asks the model for its config
    if run.accumulation > 1 and run.model in TAKES_COUNT and run.loss in ("override", "override_looked"):
        return True
    return run.model == "bert" and run.accumulation > 1 and run.loss == "model"


def _evaluation_loss_is_a_mean_of_means(run):
    return run.ragged and (run.evaluation != "no" or run.eval_first or run.around or run.habits)


def _draws_for_its_loaders(run):
    draws = run.model == "mlp_dropout" or run.loader in ("own_shuffled", "own_batches", "own_weighted", "own_workers")
    return draws or run.data == "noisy"


def _stream_ends_within_a_step(run):
    return run.is_stream and (run.drop_last or run.length % (run.batch * run.accumulation) != 0)


def _loss_is_computed_in_another_precision(run):
    return run.bf16 and run.loss != "model"


REASONS = (
    _loss_is_computed_in_another_precision,
    _loss_is_divided_otherwise,
    _evaluation_loss_is_a_mean_of_means,
    _draws_for_its_loaders,
    _stream_ends_within_a_step,
    lambda run: run.loss == "smoothing" and "say_that_the_model_takes_no_count" in dict(run.habits),
    lambda run: run.twice,
    lambda run: bool(run.assigned),  # what followed from the values before stays
    lambda run: run.max_steps > 0 and "stop_the_epoch" in dict(run.habits),  # it ends with the epochs it had planned
    lambda run: bool(run.changed),  # what it does then is a resume of its own, not what the arguments say
    # Asked to stop before the first step, it makes one.
    lambda run: run.eval_first and ("stop_after_an_evaluation", 0) in run.habits,
    lambda run: run.loader == "own_list",
    lambda run: any(not HABITS[name].reference for name, _ in run.habits),
    lambda run: run.ranks > 1,
    lambda run: bool(run.options),
    lambda run: run.order == "random_computed",  # it has no such order
    lambda run: run.save != "no" and run.model == "mlp_tied",  # it cannot save it
    lambda run: run.model in LANGUAGE_MODELS and run.data == "epochs",
)
