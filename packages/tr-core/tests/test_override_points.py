"""Methods that subclasses of the reference's Trainer override have their effect here."""

from contextlib import contextmanager

import pytest
import torch
from small_models import Classifier, CountedSum, samples
from torch import nn

from tr_core import Trainer
from tr_core.data.sampler import UserSampler


@contextmanager
def noting(seen, name):
    seen.append(name)
    yield


@pytest.mark.parametrize("name", ["compute_loss_context_manager", "autocast_smart_context_manager"])
def test_a_context_of_ones_own_surrounds_every_forward_and_its_loss(make_trainer, name):
    seen = []

    class Own(Trainer):
        pass

    setattr(Own, name, lambda self: noting(seen, torch.is_grad_enabled()))
    trainer = make_trainer(20, trainer_class=Own, eval_dataset=samples(8, 1))
    trainer.train()
    assert seen == [True] * 5
    trainer.evaluate()
    assert seen == [True] * 5 + [False]


def test_a_context_may_add_to_that_of_mixed_precision(make_trainer):
    dtypes = []

    class Watching(Classifier):
        def forward(self, x, labels=None):
            dtypes.append(nn.functional.linear(x, self.layers[0].weight).dtype)
            return super().forward(x, labels)

    class Own(Trainer):
        @contextmanager
        def compute_loss_context_manager(self):
            with super().compute_loss_context_manager():
                yield

    make_trainer(4, trainer_class=Own, model=Watching(), bf16=True).train()
    assert dtypes == [torch.bfloat16]


def test_samples_of_a_step_are_those_of_all_micro_batches(make_trainer):
    trainer = make_trainer(gradient_accumulation_steps=3)
    assert trainer.get_total_train_batch_size(trainer.args) == 12
    trainer.strategy.world_size = 2
    assert trainer.get_total_train_batch_size(trainer.args) == 24


def test_a_schedule_of_a_subclass_is_given_the_optimizer_and_the_length(make_trainer):
    given = []

    class Own(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            given.append((num_training_steps, optimizer or self.optimizer))
            return super().create_scheduler(num_training_steps, optimizer)

    trainer = make_trainer(20, trainer_class=Own)
    trainer.train()
    assert given == [(5, trainer.optimizer)]


def test_an_optimizer_can_be_made_for_a_part_of_the_model(make_trainer):
    class Own(Trainer):
        def create_optimizer(self):
            return super().create_optimizer(self.model.layers[3])

    trainer = make_trainer(trainer_class=Own)
    before = trainer.model.layers[0].weight.clone()
    trainer.train()
    assert torch.equal(trainer.model.layers[0].weight, before)
    assert sum(len(members) for members in trainer.get_optimizer_group()) == 2


# The order of the samples


class Backwards:
    """Indices from the last to the first."""

    def __init__(self, data):
        self.data = data
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return reversed(range(len(self.data)))


class Seeing(Classifier):
    """Notes the batches it is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, labels=None):
        self.seen.append(x.clone())
        return super().forward(x, labels)


def test_a_sampler_of_ones_own_gives_the_order_of_training(make_trainer):
    sampler = Backwards(range(10))

    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            assert train_dataset is self.train_dataset
            return sampler

    model, rows = Seeing(), samples(10)
    make_trainer(trainer_class=Own, model=model, train_dataset=rows, num_train_epochs=2).train()
    expected = torch.stack([row["x"] for row in reversed(rows)])
    assert torch.equal(torch.cat(model.seen), torch.cat([expected, expected]))
    assert sampler.epochs == [0, 1]


def test_a_sampler_method_without_an_argument_and_one_of_evaluation_act_too(make_trainer):
    class Own(Trainer):
        def _get_train_sampler(self):
            return [3, 3, 1, 0]

        def _get_eval_sampler(self, eval_dataset):
            return [2, 0]

    model, rows = Seeing(), samples(6)
    trainer = make_trainer(trainer_class=Own, model=model, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert torch.equal(torch.cat(model.seen), torch.stack([rows[index]["x"] for index in (3, 3, 1, 0)]))
    model.seen.clear()
    assert trainer.evaluate()["eval_samples_per_second"] > 0
    assert torch.equal(torch.cat(model.seen), torch.stack([rows[index]["x"] for index in (2, 0)]))


def weighted():
    return torch.utils.data.WeightedRandomSampler([1.0, 5.0] * 15, num_samples=23)


def test_a_random_sampler_has_the_same_order_on_all_ranks_and_from_any_position():
    def batches(epoch, position=0, rank=0, world_size=1, size=4):
        sampler = UserSampler(weighted(), size, seed=3, rank=rank, world_size=world_size)
        sampler.seek(epoch, position)
        torch.manual_seed(epoch * 100 + position + rank)  # whatever the process drew before
        return [list(batch) for batch in sampler]

    whole = [index for batch in batches(0) for index in batch]
    assert len(whole) == 23
    assert [index for batch in batches(0, 8) for index in batch] == whole[8:]
    first, second = batches(0, rank=0, world_size=2, size=2), batches(0, rank=1, world_size=2, size=2)
    assert [index for pair in zip(first, second, strict=True) for batch in pair for index in batch] == whole
    assert [index for batch in batches(1) for index in batch] != whole


def test_a_sampler_takes_no_random_number_from_the_run():
    sampler = UserSampler(weighted(), 4, seed=3)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    list(sampler)
    assert torch.equal(torch.rand(1), expected)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(samples(4))


BAD_SAMPLERS = [
    (iter([1]), {}, "list_iterator, which a sampler method of the Trainer returned, has no length"),
    (Backwards([1]), {"train_dataset": Endless(), "max_steps": 1}, "Backwards, .* but Endless is iterable data"),
    (
        type("Short", (list,), {"__len__": lambda self: 3})([0]),
        {},
        "Short gave 1 samples in epoch 0 and has",
    ),
]


@pytest.mark.parametrize(("sampler", "parts", "message"), BAD_SAMPLERS)
def test_a_sampler_that_cannot_be_used_is_refused(make_trainer, sampler, parts, message):
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return sampler

    with pytest.raises(ValueError, match=message):
        make_trainer(trainer_class=Own, **parts).train()


@pytest.mark.parametrize(
    "form", ["def step(self, model, inputs, items=None)", "def step(self, model, inputs, *rest)",
             "def step(self, model, inputs, **options)", "def step(self, model, inputs, *, num_items_in_batch=None)"],
)  # fmt: skip
def test_an_override_of_training_step_gets_the_count_whatever_it_calls_it(make_trainer, model, form):
    found = []
    values = {"items=None": "items", "*rest": "rest[0]", "**options": "options['num_items_in_batch']"}
    value = next((text for end, text in values.items() if form.endswith(f"{end})")), "num_items_in_batch")
    space = {"found": found, "Trainer": Trainer}
    body = f"found.append(int({value})); return Trainer.training_step(self, model, inputs, {value})"
    exec(f"{form}: {body}", space)
    kind = type("Own", (Trainer,), {"training_step": space["step"]})
    make_trainer(8, trainer_class=kind, model=CountedSum()).train()
    assert found == [4, 4]
