"""What is filled in where a DeepSpeed configuration says `auto`: all that transformers fills, with the same values."""

import copy
import importlib.util
from types import SimpleNamespace

import pytest
from torch import nn

from tr_core import TrainingArguments
from tr_dist.testing import filled_configuration

pytestmark = [
    pytest.mark.column("deepspeed"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

SETTINGS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "train_batch_size": 12,
    "gradient_clipping": 0.7,
    "optimizer.params.lr": 3e-4,
    "optimizer.params.betas": [0.8, 0.95],
    "optimizer.params.eps": 1e-7,
    "optimizer.params.weight_decay": 0.02,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 3e-4,
    "scheduler.params.total_num_steps": 50,
    "scheduler.params.warmup_num_steps": 5,
    "fp16.enabled": False,
    "bf16.enabled": True,
    "zero_optimization.reduce_bucket_size": 256,
    "zero_optimization.stage3_prefetch_bucket_size": 230,
    "zero_optimization.stage3_param_persistence_threshold": 160,
}
FROM_MODEL = [path for path in SETTINGS if path.startswith("zero_optimization")]
# The Trainer's loop does these itself, by the arguments: they are compared, and not handed on.
OF_THE_LOOP = [path for path in SETTINGS if path.startswith(("scheduler", "gradient_clipping"))]


def configuration(**changes):
    made = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}}}
    made["zero_optimization"] = {"stage": 3}
    for path in SETTINGS:
        *above, last = path.split(".")
        section = made
        for step in above:
            section = section.setdefault(step, {})
        section[last] = changes.get(path, "auto")
    return made


def arguments(folder):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 50, "warmup_steps": 5}
    adam = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-7, "weight_decay": 0.02, "learning_rate": 3e-4}
    return TrainingArguments(output_dir=str(folder), bf16=True, use_cpu=True, max_grad_norm=0.7, **sizes, **adam)


def model():
    network = nn.Linear(2, 2)
    network.config = SimpleNamespace(hidden_size=16)
    return network


def look_up(configuration, path):
    """Return the setting at a dotted path; None if there is none."""
    for step in path.split("."):
        configuration = configuration.get(step) if isinstance(configuration, dict) else None
    return configuration


def filled_by_transformers(given, folder):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    ours = arguments(folder)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "learning_rate", "bf16")
    names += ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "fp16")
    theirs = SimpleNamespace(**{name: getattr(ours, name) for name in names}, world_size=1, save_on_each_node=False)
    theirs.fp16_full_eval = theirs.bf16_full_eval = False
    theirs.get_warmup_steps = lambda num_training_steps: ours.warmup_steps
    filled = HfTrainerDeepSpeedConfig(copy.deepcopy(given))
    filled.trainer_config_process(theirs)
    filled.trainer_config_finalize(theirs, model(), num_training_steps=50)
    return filled.config


def test_all_that_transformers_fills_is_filled_with_its_values(tmp_path):
    theirs = filled_by_transformers(configuration(), tmp_path)
    assert {path: look_up(theirs, path) for path in SETTINGS} == SETTINGS
    ours = filled_configuration(configuration(), arguments(tmp_path), model=model())
    filled = {path: value for path, value in SETTINGS.items() if path not in OF_THE_LOOP}
    assert {path: look_up(ours, path) for path in filled} == filled
    assert all(look_up(ours, path) is None for path in OF_THE_LOOP)


@pytest.mark.row("refused")
@pytest.mark.parametrize("path", [path for path in SETTINGS if path not in FROM_MODEL])
def test_a_value_that_disagrees_with_the_arguments_is_refused_as_transformers_does(path, tmp_path):
    value = SETTINGS[path]
    other = not value if isinstance(value, bool) else [0.5, 0.5] if isinstance(value, list) else value + 1
    given = configuration(**{path: other})
    if path == "scheduler.params.warmup_min_lr":  # which transformers takes as it is, whatever its own schedule does
        filled_by_transformers(given, tmp_path)
    else:
        with pytest.raises(ValueError, match=path.rpartition(".")[2]):
            filled_by_transformers(given, tmp_path)
    with pytest.raises(ValueError, match=path.replace(".", r"\.")):
        filled_configuration(given, arguments(tmp_path))


@pytest.mark.parametrize("path", FROM_MODEL)
def test_a_size_that_is_given_stays(path, tmp_path):
    ours = filled_configuration(configuration(**{path: 7}), arguments(tmp_path), model=model())
    assert look_up(ours, path) == 7
