"""Loaders that a subclass makes itself, with a sampler: the same batches in a run, and in one that is resumed."""

import parity_data as data
import parity_models as models
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from parity_harness import OURS, REFERENCE, Scenario, assert_same, build, run, run_both, same_tensors
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler
from transformers import TrainerCallback

# A short last batch of a loader of one's own counts as a whole one in the speed that is logged at the end.
BUT = ("rates",)

SAVING = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 3}


class OneDataSetABatch(Sampler):
    """A batch sampler for several data sets: each batch is of one of them, drawn from a generator when it is its turn.

    `set_epoch` seeds the generator anew, and shuffles each data set.
    """

    def __init__(self, sizes, batch_size):
        self.sizes, self.batch_size, self.generator = sizes, batch_size, torch.Generator().manual_seed(5)
        self.first_seed = self.generator.initial_seed()
        self.shuffle(self.generator)

    def shuffle(self, generator):
        self.orders = [torch.randperm(size, generator=generator).tolist() for size in self.sizes]

    def set_epoch(self, epoch):
        self.generator.manual_seed(self.first_seed + epoch)
        self.shuffle(torch.Generator().manual_seed(self.first_seed + epoch))

    def __len__(self):
        return sum(size // self.batch_size for size in self.sizes)

    def __iter__(self):
        taken = [0] * len(self.sizes)
        while left := [n for n, size in enumerate(self.sizes) if taken[n] + self.batch_size <= size]:
            chosen = left[int(torch.randint(len(left), (1,), generator=self.generator))]
            begin = taken[chosen]
            taken[chosen] += self.batch_size
            indices = self.orders[chosen][begin : begin + self.batch_size]
            yield [sum(self.sizes[:chosen]) + index for index in indices]


def of_several_data_sets(trainer):
    return {"batch_sampler": OneDataSetABatch([8, 12, 4], 4)}


def with_loader(options, num_workers=0):
    """Make a subclass whose training loader has these options, and is prepared by the accelerator."""

    def subclass(trainer_class):
        class Own(trainer_class):
            def get_train_dataloader(self):
                own = {"collate_fn": self.data_collator, "num_workers": num_workers, **options(self)}
                return self.accelerator.prepare(DataLoader(self.train_dataset, **own))

        return Own

    return subclass


def assert_goes_on(scenario, folder, steps):
    """Compare whole runs of both, and runs of both that were resumed after each of these steps with the whole one."""
    reference, ours = (run(side, scenario, folder / side.name) for side in (REFERENCE, OURS))
    assert_same(reference, ours, but=BUT)
    for side, whole in ((REFERENCE, reference), (OURS, ours)):
        for step in steps:
            checkpoint = str(folder / side.name / f"checkpoint-{step}")
            resumed = run(side, scenario, folder / f"{side.name}-{step}", resume_from_checkpoint=checkpoint)
            assert resumed.losses == whole.losses, (side.name, step)
            assert same_tensors(whole.weights, resumed.weights), (side.name, step)
    return ours


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_several_data_sets_are_the_same_after_a_resume(num_workers, tmp_path):
    scenario = Scenario(
        models.Mlp, data.classes(24), arguments=SAVING, subclass=with_loader(of_several_data_sets, num_workers)
    )
    assert_goes_on(scenario, tmp_path, (1, 4, 6, 9, 17))


def of_the_usual_sampler(trainer):
    return {"batch_size": 4, "sampler": trainer._get_train_sampler()}


SHUFFLED = {
    "shuffle": lambda trainer: {"batch_size": 4, "shuffle": True},
    "the usual sampler": of_the_usual_sampler,
    "a sampler with a generator": lambda trainer: {
        "batch_size": 4,
        "sampler": RandomSampler(trainer.train_dataset, generator=torch.Generator().manual_seed(3)),
    },
    "with replacement": lambda trainer: {
        "batch_size": 4,
        "sampler": RandomSampler(trainer.train_dataset, replacement=True, num_samples=18),
    },
    "a batch sampler": lambda trainer: {
        "batch_sampler": BatchSampler(RandomSampler(trainer.train_dataset), 4, drop_last=False)
    },
    "weighted": lambda trainer: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0, 2.0] * 9, 18)},
}


@pytest.mark.parametrize("seeds", [{}, {"seed": 5}, {"seed": 5, "data_seed": 9}], ids=["usual", "seed", "data seed"])
def test_a_prepared_loader_of_the_usual_sampler_has_the_order_of_the_reference(seeds, tmp_path):
    subclass = with_loader(of_the_usual_sampler)
    arguments = {**SAVING, **seeds}
    scenario = Scenario(models.dropping_mlp, data.classes(), arguments=arguments, subclass=subclass)
    ours = assert_goes_on(scenario, tmp_path, (1, 5, 7, 14))
    orders = [torch.cat([batch["x"] for batch in ours.batches.train[begin : begin + 5]]) for begin in (0, 5, 10)]
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[1], orders[2])


@pytest.mark.parametrize("kind", SHUFFLED)
def test_a_prepared_loader_has_the_order_of_the_reference(kind, tmp_path):
    scenario = Scenario(
        models.dropping_mlp,
        data.classes(),
        arguments={"num_train_epochs": 3, "data_seed": 9},
        subclass=with_loader(SHUFFLED[kind]),
    )
    assert_same(*run_both(scenario, tmp_path), but=BUT)


def test_a_prepared_loader_of_another_order_keeps_it(tmp_path):
    arguments = {"num_train_epochs": 2, "train_sampling_strategy": "sequential"}
    scenario = Scenario(models.Mlp, data.classes(), arguments=arguments, subclass=with_loader(of_the_usual_sampler))
    assert_same(*run_both(scenario, tmp_path), but=BUT)


def test_an_accelerator_of_the_users_own_takes_the_usual_sampler_for_torchs(tmp_path):
    """Without that, ranks whose generators differ would each have an order of their own."""
    trainer = build(OURS, Scenario(models.Mlp, data.classes()), tmp_path).trainer
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4)
    loader = DataLoader(trainer.train_dataset, batch_size=4, sampler=trainer._get_train_sampler())
    prepared = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
    order = list(prepared.batch_sampler.sampler)
    assert order == torch.randperm(18, generator=torch.Generator().manual_seed(4)).tolist()
    sampler = trainer._get_train_sampler()
    sampler.generator = torch.Generator().manual_seed(4)  # as accelerate sets it for several processes otherwise
    assert list(sampler) == order


class Seeding(TrainerCallback):
    """Seeds the generators at the beginning of each step."""

    def on_step_begin(self, args, state, control, **given):
        torch.manual_seed(100 + state.global_step)


def test_a_loader_begins_before_the_events_of_its_first_step(tmp_path):
    """What a callback seeds there is the dropout's alone, as with transformers: the loader has drawn its seed."""
    scenario = Scenario(
        models.dropping_mlp,
        data.classes(),
        arguments={"num_train_epochs": 2},
        callbacks=lambda: [Seeding()],
        subclass=with_loader(of_the_usual_sampler),
    )
    assert_same(*run_both(scenario, tmp_path), but=BUT)


def test_a_prepared_loader_of_an_evaluation_has_the_order_of_the_reference_though_a_callback_seeds(tmp_path):
    """Accelerate's sampler is of the number that torch was last seeded with."""

    def subclass(trainer_class):
        class Own(trainer_class):
            def get_eval_dataloader(self, eval_dataset=None):
                own = {"collate_fn": self.data_collator, "batch_size": 4, "shuffle": True}
                return self.accelerator.prepare(DataLoader(self.eval_dataset, **own))

        return Own

    scenario = Scenario(
        models.Mlp,
        data.classes(),
        data.classes(16, seed=4),
        arguments={**SAVING, "eval_strategy": "steps", "eval_steps": 2},
        callbacks=lambda: [Seeding()],
        subclass=subclass,
    )
    ours = assert_goes_on(scenario, tmp_path, (1, 6))
    assert not torch.equal(ours.batches.eval[0]["x"], ours.batches.eval[4]["x"])


@pytest.mark.parametrize("loader", [of_the_usual_sampler, of_several_data_sets])
def test_a_checkpoint_of_the_reference_goes_on_here_with_the_same_batches_and_dropout(loader, tmp_path):
    subclass = with_loader(loader)
    scenario = Scenario(models.dropping_mlp, data.classes(24), arguments=SAVING, subclass=subclass)
    whole = run(REFERENCE, scenario, tmp_path / "reference")
    for step in (1, 4, 6, 8):
        checkpoint = str(tmp_path / "reference" / f"checkpoint-{step}")
        resumed = run(OURS, scenario, tmp_path / f"from {step}", resume_from_checkpoint=checkpoint)
        assert resumed.losses == whole.losses, step
        assert same_tensors(whole.weights, resumed.weights), step
