"""Which settings of accelerator_config act, and why the others are refused."""

import json
from types import SimpleNamespace

import pytest

from tr_args import AcceleratorConfig
from tr_core import SingleDevice
from tr_core.plan import check_accelerator_config

REFUSED = {
    "dispatch_batches": (True, "each rank reads its own share of every micro-batch"),
    "even_batches": (False, "every rank takes part in every step, and no sample counts twice"),
    "use_seedable_sampler": (False, "the order of the data follows from seed and epoch alone"),
    "use_configured_state": (True, "a process group that exists is used in any case"),
}


def settings(accumulation=1, train=8, evaluation=8, **config):
    return SimpleNamespace(
        accelerator_config=AcceleratorConfig(**config),
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=train,
        per_device_eval_batch_size=evaluation,
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_its_reason(make_trainer, name):
    value, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"accelerator_config cannot be used as it is:\n  {name}={value}: .*{reason}"):
        make_trainer(8, accelerator_config={name: value})


def test_all_problems_are_reported_at_once():
    config = {name: value for name, (value, _) in REFUSED.items()}
    with pytest.raises(ValueError) as caught:
        check_accelerator_config(settings(**config), 1)
    assert all(reason in str(caught.value) for _, reason in REFUSED.values())


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dispatch_batches": False, "non_blocking": True, "split_batches": True},
        {"gradient_accumulation_kwargs": {"num_steps": 2, "sync_each_batch": True}},
    ],
)
def test_what_acts_or_is_so_anyway_is_accepted_from_a_dict_a_file_or_the_class(make_trained, tmp_path, config):
    path = tmp_path / "accelerator.json"
    path.write_text(json.dumps(config))
    for given in (config, str(path), AcceleratorConfig(**config)):
        trainer = make_trained(20, accelerator_config=given, gradient_accumulation_steps=2)
        assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 4}, "num_steps=4, but gradient_accumulation_steps=2; set only the latter"),
        ({"steps": 4}, r"gradient_accumulation_kwargs has \['steps'\]; it takes \['num_steps', 'sync_each_batch'\]"),
        ({"sync_each_batch": "yes"}, "sync_each_batch='yes'; it needs true or false"),
    ],
)
def test_accumulation_has_one_length(options, message):
    with pytest.raises(ValueError, match=message):
        check_accelerator_config(settings(accumulation=2, gradient_accumulation_kwargs=options), 1)


def test_a_batch_that_cannot_be_divided_among_the_processes_is_refused():
    check_accelerator_config(settings(train=12, evaluation=6, split_batches=True), 3)
    with pytest.raises(ValueError, match="per_device_eval_batch_size=8 cannot be divided among 3 processes"):
        check_accelerator_config(settings(train=12, split_batches=True), 3)


class Recording(SingleDevice):
    def __init__(self):
        super().__init__("cpu")
        self.synced = []

    def accumulate(self, model, *, sync):
        self.synced.append(sync)
        return super().accumulate(model, sync=sync)


@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_exchanged_after_every_micro_batch_if_that_is_asked_for(make_args, model, each):
    from support.data import samples

    from tr_core import Trainer

    config = {"gradient_accumulation_kwargs": {"sync_each_batch": each}}
    args = make_args(accelerator_config=config, gradient_accumulation_steps=3)
    strategy = Recording()
    Trainer(model, args, train_dataset=samples(24), strategy=strategy).train()
    assert strategy.synced == [each, each, True] * 2
