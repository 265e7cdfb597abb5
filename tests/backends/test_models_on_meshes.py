"""Each causal class of transformers on the meshes that its plans allow: the numbers of one process, or words."""

import warnings

import pytest
import torch
from shared.causal_models import CONFIGS, KINDS, MOST_PARAMETERS, small_config
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks
from tr_log import PrinterCallback

pytestmark = [pytest.mark.column("mesh"), pytest.mark.slow]
SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
FORMS = {form: {"parallelism_config": f"{form}=2", **SIZES} for form in ("tp", "sp", "cp", "pp")}
FORMS["ep"] = {"parallelism_config": "ep=2", **SIZES, "per_device_train_batch_size": 1}
ROUNDED = 1e-4  # models of float64 compute some of it in float32
FEW_WORDS = {"LongcatFlashForCausalLM"}  # an expert without a word in one of two pieces has no gradient there
REFUSALS = (ValueError, TypeError, RuntimeError, AssertionError)  # of models and torch, where shapes do not fit
OTHERWISE = {
    "PhimoeForCausalLM": ("sp", "cp", "ep"),  # it checks its mask's shape itself, and draws its routes
}


def model_of(name, dtype):
    """Return a model without dropout."""
    config = small_config(KINDS[name], CONFIGS[name])
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model = KINDS[name](config).to(dtype)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def forms_of(name):
    """Return the forms of which a model has the plan."""
    with torch.device("meta"):
        model = KINDS[name](config := small_config(KINDS[name], CONFIGS[name]))
    if (size := sum(parameter.numel() for parameter in model.parameters())) > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    plans = {"tp": model._tp_plan, "ep": model._ep_plan, "pp": getattr(config, "base_model_pp_plan", None)}
    return [form for form in FORMS if plans.get(form, True)]


def rows():
    generator = torch.Generator().manual_seed(0)
    words, labels = (torch.randint(3, 60, (8, 8), generator=generator) for _ in range(2))
    for number in range(0, 8, 3):
        labels[number, : number % 4] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def train(folder, name, options, dtype):
    """Return the losses and norms of two steps, and the loss of an evaluation."""
    args = TrainingArguments(
        folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, log_level="error", max_steps=2,
        optim="sgd", learning_rate=0.05, logging_steps=1, label_names=["labels"], **options,
    )  # fmt: skip
    if name in FEW_WORDS and "parallelism_config" in options:
        args.ddp_find_unused_parameters = True
    trainer = Trainer(model_of(name, dtype), args, train_dataset=rows(), eval_dataset=rows()[:3])
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    except BaseException:
        trainer.strategy.close(failed=True)  # and does not wait for the others, which may wait for this one
        raise
    trainer.strategy.close()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [loss, *(entry[name] for entry in steps for name in ("loss", "grad_norm"))]


def in_rank(folder, name, form, dtype):
    """Return the numbers of a run on a mesh, or the error's words."""
    warnings.simplefilter("ignore")
    try:
        return train(folder, name, FORMS[form], dtype)
    except Exception as error:
        # Of a fault of ours, an AttributeError perhaps, the note about meshes makes no refusal.
        notes = getattr(error, "__notes__", ()) if isinstance(error, REFUSALS) else ()
        cause = str(error.__cause__)  # a schedule's error has ours as its cause
        return " ".join([f"{type(error).__name__}: {error}", *notes, cause])


def alone(folder, name):
    """Return the numbers of one process, and the type in which the model computes: not all can do so in float64."""
    try:
        return train(folder, name, SIZES, torch.float64), torch.float64
    except (RuntimeError, NotImplementedError):
        return train(folder, name, SIZES, torch.float32), torch.float32


def is_refused(words):
    """Whether an error is one of ours, in words."""
    ours = ("tp_plan", "shared out by experts", "got no gradient")
    return any(f"{form}_size" in words for form in FORMS) or any(part in words for part in ours)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_model_gives_the_numbers_of_one_process_or_is_refused(name, tmp_path):
    try:
        forms = forms_of(name)
        expected, dtype = alone(str(tmp_path / "alone"), name)
    except Exception as error:  # the sizes here fit most models, not all
        print(f"{type(error).__name__}: {error}")
        pytest.skip("it cannot be built or trained small")
    forms = [form for form in forms if form not in OTHERWISE.get(name, ())]
    for form in forms:
        found = run_ranks(in_rank, 2, str(tmp_path / form), name, form, dtype, timeout_s=120)
        if words := [each for each in found if isinstance(each, str)]:  # the others may have lost their peer
            assert any(map(is_refused, words)), f"{form}: {words}"
        for numbers in found:
            if not isinstance(numbers, str):
                assert numbers == pytest.approx(expected, rel=ROUNDED * (1 if dtype is torch.float64 else 10)), form
