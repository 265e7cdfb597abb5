"""Subclasses with samplers, loaders and collators of their own, on transformers' Trainer and on ours."""

import random

import datasets
import torch
from habit_parts import rows, stack
from subclass_parts import assert_equal, class_rows, run_alike, run_both
from torch.utils.data import DataLoader, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler


def two_columns(samples):
    return {
        "x": torch.stack([torch.as_tensor(s["x"]) for s in samples]),
        "labels": torch.tensor([float(s["labels"]) for s in samples]),
    }


def table(number=8, seed=0):
    listed = [{"x": row["x"].tolist(), "labels": row["labels"].item()} for row in rows(number, seed)]
    return datasets.Dataset.from_list([{**row, "text": f"row {i}", "weight": float(i)} for i, row in enumerate(listed)])


def test_a_sampler_only_where_an_option_asks_for_it_leaves_the_usual_order(tmp_path):
    class OptionalTrainer:
        balanced = False

        def _get_train_sampler(self, *args, **kwargs):
            if self.balanced:
                return WeightedRandomSampler([1.0] * len(self.train_dataset), len(self.train_dataset))
            return super()._get_train_sampler(*args, **kwargs)

    run_alike(tmp_path, OptionalTrainer, num_train_epochs=2)


def test_a_loader_of_ones_own_takes_the_usual_sampler(tmp_path):
    class CopiedTrainer:
        def get_train_dataloader(self):
            return DataLoader(
                self.train_dataset,
                batch_size=self._train_batch_size,
                sampler=self._get_train_sampler(),
                collate_fn=self.data_collator,
                drop_last=self.args.dataloader_drop_last,
                num_workers=self.args.dataloader_num_workers,
                pin_memory=False,
            )

    run_alike(tmp_path, CopiedTrainer, num_train_epochs=2)


def test_the_usual_sampler_is_asked_for_by_hand(tmp_path):
    class AskingTrainer:
        def get_eval_dataloader(self, eval_dataset=None):
            data = self.eval_dataset if eval_dataset is None else eval_dataset
            sampler = self._get_eval_sampler(data)
            assert list(sampler) == list(range(len(data)))
            return DataLoader(data, batch_size=3, sampler=sampler, collate_fn=self.data_collator)

    theirs, ours = run_both(
        tmp_path, AskingTrainer, use=lambda trainer: [len(trainer._get_train_sampler()), trainer.evaluate()],
        parts={"eval_dataset": lambda: rows(6, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours)


def test_buckets_that_a_sampler_shuffles_by_its_own_count_of_epochs(tmp_path):
    class Buckets:
        def __init__(self, lengths, size):
            self.lengths, self.size, self.epoch = lengths, size, 0

        def __len__(self):
            return len(self.lengths)

        def __iter__(self):
            draws = random.Random(self.epoch)
            self.epoch += 1
            order = sorted(range(len(self.lengths)), key=lambda index: (self.lengths[index], index))
            chunks = [order[start : start + self.size] for start in range(0, len(order), self.size)]
            draws.shuffle(chunks)
            return iter([index for chunk in chunks for index in chunk])

    class BucketTrainer:
        sampler = None

        def _get_train_sampler(self, *args, **kwargs):
            if self.sampler is None:
                self.sampler = Buckets([5, 1, 4, 2, 2, 7, 1, 3], 2)
            return self.sampler

    run_alike(tmp_path, BucketTrainer, num_train_epochs=2)


def test_a_shuffled_loader_with_another_batch_size(tmp_path):
    class ShuffledTrainer:
        def get_train_dataloader(self):
            draws = torch.Generator().manual_seed(self.args.seed)
            return DataLoader(self.train_dataset, batch_size=4, shuffle=True, generator=draws, collate_fn=stack)

    _, ours = run_alike(tmp_path, ShuffledTrainer, num_train_epochs=3)
    assert ours.trainer.state.global_step == 6


def test_batches_of_unequal_sizes_by_a_batch_sampler(tmp_path):
    def by_day(base):
        class DayTrainer(base):
            days = [[4, 5, 6], [0, 1], [2, 3, 7]]

            def get_train_dataloader(self):
                return DataLoader(self.train_dataset, batch_sampler=self.days, collate_fn=self.data_collator)

        return DayTrainer

    run_alike(tmp_path, by_day, num_train_epochs=2)


def test_loaders_of_two_data_sets_take_turns(tmp_path):
    class Turns:
        def __init__(self, *loaders):
            self.loaders = loaders

        def __len__(self):
            return sum(map(len, self.loaders))

        def __iter__(self):
            running = [iter(loader) for loader in self.loaders]
            while running:
                for loader in list(running):
                    batch = next(loader, None)
                    if batch is None:
                        running.remove(loader)
                    else:
                        yield batch

    class MixedTrainer:
        def __init__(self, *args, second=None, **kwargs):
            super().__init__(*args, **kwargs)
            self.second = second

        def get_train_dataloader(self):
            options = {"batch_size": self.args.train_batch_size, "collate_fn": self.data_collator}
            return Turns(*(DataLoader(data, **options) for data in (self.train_dataset, self.second)))

    _, ours = run_alike(
        tmp_path, MixedTrainer, build=lambda kind, parts: kind(**parts, second=rows(4, seed=2)), num_train_epochs=2
    )
    assert ours.trainer.state.global_step == 12


def test_a_loader_of_super_is_wrapped_to_watch_its_batches(tmp_path):
    class Watched:
        def __init__(self, inner):
            self.inner, self.batches = inner, 0

        def __len__(self):
            return len(self.inner)

        def __iter__(self):
            for batch in self.inner:
                self.batches += 1
                yield batch

        def __getattr__(self, name):
            return getattr(self.inner, name)

    class WatchingTrainer:
        def get_train_dataloader(self):
            self.watched = Watched(super().get_train_dataloader())
            return self.watched

    theirs, ours = run_alike(tmp_path, WatchingTrainer, num_train_epochs=2)
    assert ours.trainer.watched.batches == theirs.trainer.watched.batches == 8


def test_evaluation_loaders_are_chosen_by_the_name_of_their_data(tmp_path):
    class NamedTrainer:
        def get_eval_dataloader(self, eval_dataset=None):
            if isinstance(eval_dataset, str) and eval_dataset == "hard":
                return DataLoader(self.eval_dataset["hard"], batch_size=1, collate_fn=self.data_collator)
            return super().get_eval_dataloader(eval_dataset)

    theirs, ours = run_both(
        tmp_path, NamedTrainer, eval_strategy="epoch",
        parts={"eval_dataset": lambda: {"easy": rows(4, seed=1), "hard": rows(3, seed=2)}},
    )  # fmt: skip
    assert_equal(theirs, ours)
    assert len(ours.called("get_eval_dataloader")) == 2


def test_a_loader_of_predictions_has_a_collator_of_its_own(tmp_path):
    class PredictingTrainer:
        def get_test_dataloader(self, test_dataset):
            return DataLoader(
                test_dataset, batch_size=self.args.eval_batch_size,
                collate_fn=lambda samples: {"x": 2 * torch.stack([sample["x"] for sample in samples])},
            )  # fmt: skip

    run_alike(tmp_path, PredictingTrainer, use=lambda trainer: trainer.predict(rows(5, seed=1)).predictions.tolist())


def test_unused_columns_that_are_kept_reach_the_collator(tmp_path):
    class KeepingTrainer:
        def _remove_unused_columns(self, dataset, description=None):
            return dataset

    def collate(samples):
        return {**two_columns(samples), "labels": torch.tensor([sample["weight"] for sample in samples])}

    run_alike(tmp_path, KeepingTrainer, parts={"train_dataset": table, "data_collator": collate})


def test_columns_added_to_those_of_the_signature_reach_compute_loss(tmp_path):
    class WeightedRowsTrainer:
        def _set_signature_columns_if_needed(self):
            super()._set_signature_columns_if_needed()
            if "weight" not in self._signature_columns:
                self._signature_columns += ["weight"]

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            weights = inputs.pop("weight")
            errors = (model(inputs["x"])["logits"] - inputs["labels"]).pow(2)
            return (errors * weights).mean()

    def collate(samples):
        return {**two_columns(samples), "weight": torch.tensor([sample["weight"] for sample in samples])}

    theirs, ours = run_both(tmp_path, WeightedRowsTrainer, parts={"train_dataset": table, "data_collator": collate})
    assert_equal(*(_without(side, "_set_signature_columns_if_needed") for side in (theirs, ours)))


def test_a_collator_that_is_not_wrapped_sees_all_columns(tmp_path):
    class UnwrappedTrainer:
        def _get_collator_with_removed_columns(self, data_collator, description=None):
            return data_collator

    seen = []

    def collate(samples):
        seen.append(sorted(samples[0]))
        return stack([{"x": sample["x"], "labels": sample["labels"]} for sample in samples])

    data = [{**row, "number": index} for index, row in enumerate(rows())]
    run_alike(tmp_path, UnwrappedTrainer, parts={"train_dataset": lambda: data, "data_collator": collate})
    assert seen == [["labels", "number", "x"]] * 8


def test_a_collator_that_is_a_method_is_set_after_construction(tmp_path):
    class CollatingTrainer:
        def __init__(self, *args, scale=1.0, **kwargs):
            super().__init__(*args, **kwargs)
            self.scale = scale
            self.data_collator = self._collate

        def _collate(self, samples):
            batch = stack(samples)
            batch["x"] = self.scale * batch["x"]
            return batch

    run_alike(tmp_path, CollatingTrainer, build=lambda kind, parts: kind(**parts, scale=0.5))


def test_inputs_are_built_from_a_batch_in_training_and_evaluation(tmp_path):
    class BuildingTrainer:
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            scale = 2.0 if self.model.training else 1.0
            return {**inputs, "x": scale * inputs["x"]}

    theirs, ours = run_both(
        tmp_path, BuildingTrainer, classes=True, eval_strategy="steps", eval_steps=2,
        parts={"eval_dataset": lambda: class_rows(4, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours)


def test_data_is_prepared_by_the_constructor_before_super(tmp_path):
    class PreparingTrainer:
        def __init__(self, model, args, train_dataset, eval_dataset=None, **kwargs):
            args.remove_unused_columns = False
            with args.main_process_first(desc="preparing"):
                train_dataset = self.prepared(train_dataset)
                eval_dataset = {name: self.prepared(data) for name, data in eval_dataset.items()}
            super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)

        def prepared(self, data):
            return data.map(lambda row: {"x": [2 * value for value in row["x"]]}).remove_columns(["text", "weight"])

    theirs, ours = run_both(
        tmp_path, PreparingTrainer, eval_strategy="epoch",
        parts={
            "train_dataset": table, "eval_dataset": lambda: {"a": table(4, seed=1), "b": table(4, seed=2)},
            "data_collator": two_columns,
        },
    )  # fmt: skip
    assert_equal(theirs, ours)


def test_a_part_of_the_data_is_sampled_for_each_epoch(tmp_path):
    class PartTrainer:
        def _get_train_sampler(self, train_dataset=None):
            return SubsetRandomSampler([0, 2, 4, 6], generator=torch.Generator().manual_seed(7))

        def _get_eval_sampler(self, eval_dataset):
            return SequentialSampler(range(2))

    theirs, ours = run_both(
        tmp_path, PartTrainer, num_train_epochs=2, use=lambda trainer: (trainer.train(), trainer.evaluate())[1],
        parts={"eval_dataset": lambda: rows(4, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours)


def _without(side, *names):
    side.calls = [call for call in side.calls if call[0] not in names]
    return side
