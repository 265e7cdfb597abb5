"""Every optimizer name of transformers is this project's own, an adapter's, or refused in words."""

from importlib.metadata import entry_points

import pytest
import torch
from transformers.training_args import OptimizerNames

from tr_core import Trainer, TrainingArguments

OF_TORCH = {
    "adamw_torch": torch.optim.AdamW,
    "adamw_torch_fused": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
OURS = {
    *("adafactor", "adamw_8bit", "lomo", "adalomo"),
    *("galore_adamw", "galore_adamw_8bit", "galore_adafactor"),
    *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
    *("apollo_adamw", "apollo_adamw_layerwise"),
}
ADAPTERS = {
    "bitsandbytes": {
        *("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
        *("lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"),
        *("ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit"),
        *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
    },
    "torchao": {"adamw_torch_4bit", "adamw_torch_8bit"},
    "schedulefree": {"schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"},
    "torch-optimi": {"stable_adamw"},
    "grokadamw": {"grokadamw"},
}
REFUSED = {"adamw_anyprecision", "adamw_torch_xla", "adamw_torch_npu_fused"}


def entries():
    return {entry.name: entry for entry in entry_points(group="tr.optimizers")}


def test_every_name_is_listed_once():
    adapters = [name for names in ADAPTERS.values() for name in names]
    listed = [*OF_TORCH, *OURS, *adapters, *REFUSED]
    assert sorted(listed) == sorted(name.value for name in OptimizerNames)
    assert len(set(listed)) == len(listed)


def test_every_name_is_known_by_its_kind():
    found = entries()
    for name, kind in OF_TORCH.items():
        assert Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(output_dir="x", optim=name))[0] is kind
    assert not [name for name in OURS if ".adapters." in found[name].value]
    for names in ADAPTERS.values():
        assert all(".adapters." in found[name].value for name in names)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_those_that_are_refused_say_what_to_use(name):
    instead = "use optim='(stable_adamw'.* or optim=')?adamw_torch'"
    with pytest.raises(ValueError, match=f"there is no optimizer '{name}' .*[ ;] {instead}"):
        Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(output_dir="x", optim=name))
