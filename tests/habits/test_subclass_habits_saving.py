"""Subclasses that save, load and publish in their own way, on transformers' Trainer and on ours."""

import json
from pathlib import Path

import pytest
import torch
from habit_parts import Net, rows
from safetensors.torch import load_file, save_file
from subclass_parts import assert_equal, run_alike, run_both
from torch import nn

import tr_core

SAVING = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}


def same_files(theirs, ours, *names):
    """Check that files below the folder hold the same on both sides."""
    for name in names:
        assert (ours.folder / name).read_bytes().strip() == (theirs.folder / name).read_bytes().strip(), name


def test_an_adapter_alone_is_written_by_save_and_the_run_resumes(tmp_path):
    def adapters(base):
        class AdapterTrainer(base):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.model.body.requires_grad_(False)

            def _save(self, output_dir=None, state_dict=None):
                folder = Path(output_dir if output_dir is not None else self.args.output_dir)
                folder.mkdir(parents=True, exist_ok=True)
                if state_dict is None:
                    state_dict = self.model.state_dict()
                save_file(
                    {name: value for name, value in state_dict.items() if "head" in name},
                    folder / "adapter.safetensors",
                )
                (folder / "adapter.json").write_text(json.dumps({"kind": "head"}))

        return AdapterTrainer

    def use(trainer):
        trainer.train()
        trainer.save_model()

    theirs, ours = run_both(tmp_path, adapters, use=use, **SAVING)
    assert_equal(theirs, ours, but=("output_dir", "state_dict"))
    same_files(theirs, ours, *(f"{folder}adapter.safetensors" for folder in ("", "checkpoint-2/", "checkpoint-4/")))
    assert not list(ours.folder.rglob("model.safetensors"))
    resumed = adapters(tr_core.Trainer)(Net(seed=9), ours.trainer.args, train_dataset=rows())
    resumed.train(resume_from_checkpoint=str(ours.folder / "checkpoint-2"))
    assert all(torch.equal(value, ours.weights[name]) for name, value in resumed.model.state_dict().items())


@pytest.mark.parametrize("name", ["_save", "save_model"])
def test_a_checkpoint_of_transformers_is_resumed_where_an_override_writes_the_model(tmp_path, name):
    def noting(base):
        def write(self, output_dir=None, *args, **kwargs):
            getattr(base, name)(self, output_dir, *args, **kwargs)
            Path(output_dir or self.args.output_dir, "card.json").write_text("{}")

        return type("NotingTrainer", (base,), {name: write})

    theirs, ours = run_both(tmp_path, noting, optim="adamw_torch", **SAVING)
    assert_equal(theirs, ours, but=("output_dir", "state_dict", "args", "kwargs"))
    resumed = noting(tr_core.Trainer)(Net(seed=9), ours.trainer.args, train_dataset=rows())
    resumed.train(resume_from_checkpoint=str(theirs.folder / "checkpoint-2"))
    assert all(torch.equal(value, theirs.weights[name]) for name, value in resumed.model.state_dict().items())


def test_a_model_is_written_under_another_name_by_save_model(tmp_path):
    class RenamingTrainer:
        def save_model(self, output_dir=None, _internal_call=False):
            folder = Path(output_dir or self.args.output_dir) / "final"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), folder / "weights.pt")

    def use(trainer):
        trainer.train()
        trainer.save_model()

    theirs, ours = run_both(tmp_path, RenamingTrainer, use=use, **SAVING)
    assert_equal(theirs, ours, but=("output_dir",))
    for name in ("final/weights.pt", "checkpoint-2/final/weights.pt"):
        saved, expected = (torch.load(side.folder / name, weights_only=True) for side in (ours, theirs))
        assert all(torch.equal(value, expected[key]) for key, value in saved.items())


def test_a_file_is_added_to_each_checkpoint(tmp_path):
    def adding(base):
        class AddingTrainer(base):
            def _save_checkpoint(self, model, trial, **kwargs):
                super()._save_checkpoint(model, trial, **kwargs)
                folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
                (folder / "extra.json").write_text(json.dumps({"step": self.state.global_step}))

        return AddingTrainer

    theirs, ours = run_alike(tmp_path, adding, **SAVING)
    same_files(theirs, ours, "checkpoint-2/extra.json", "checkpoint-4/extra.json")
    resumed = adding(tr_core.Trainer)(Net(seed=9), ours.trainer.args, train_dataset=rows())
    resumed.train(resume_from_checkpoint=str(ours.folder / "checkpoint-2"))
    assert all(torch.equal(value, ours.weights[name]) for name, value in resumed.model.state_dict().items())


def test_the_folder_of_a_checkpoint_is_made_before_super_saves_it(tmp_path):
    class MakingTrainer:
        def _save_checkpoint(self, model, trial, **kwargs):
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "before.txt").write_text("before")
            return super()._save_checkpoint(model, trial, **kwargs)

    theirs, ours = run_alike(tmp_path, MakingTrainer, **SAVING)
    same_files(theirs, ours, "checkpoint-2/before.txt", "checkpoint-2/model.safetensors")


def test_what_was_written_before_a_save_that_fails_is_still_there(make_trainer):
    class Unwritable:
        def save_pretrained(self, folder):
            raise OSError("planted")

    class MakingTrainer(tr_core.Trainer):
        def _save_checkpoint(self, model, trial):
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True)
            (folder / "before.txt").write_text("before")
            super()._save_checkpoint(model, trial)

    trainer = make_trainer(MakingTrainer, save_strategy="steps", save_steps=2, processing_class=Unwritable())
    with pytest.raises(OSError, match="planted"):
        trainer.train()
    folder = Path(trainer.args.output_dir, "checkpoint-2")
    assert [path.name for path in folder.iterdir()] == ["before.txt"]
    assert not list(folder.parent.glob("*.replaced-*"))


def test_a_checkpoint_that_is_a_projector_alone_is_written_without_super(tmp_path):
    class ProjectorTrainer:
        def _save_checkpoint(self, model, trial, metrics=None):
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            weights = {name: value for name, value in self.model.named_parameters() if "body" in name}
            torch.save({name: value.detach().cpu() for name, value in weights.items()}, folder / "projector.bin")

    theirs, ours = run_alike(tmp_path, ProjectorTrainer, **SAVING)
    assert ours.files("checkpoint-2") == theirs.files("checkpoint-2") == ["projector.bin"]


def test_a_copy_of_the_older_save_checkpoint_is_refused_at_what_is_not_here(make_trainer):
    class CopyingTrainer(tr_core.Trainer):
        def _save_checkpoint(self, model, trial, metrics=None):
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            self.save_model(str(folder), _internal_call=True)
            self._save_optimizer_and_scheduler(str(folder))

    with pytest.raises(RuntimeError, match=r"_save_optimizer_and_scheduler was called .* super\(\)._save_checkpoint"):
        make_trainer(CopyingTrainer, save_strategy="steps", save_steps=2).train()


def test_more_weights_are_loaded_after_those_of_super(tmp_path):
    def loading(base):
        class LoadingTrainer(base):
            extra = torch.zeros(2)

            def _save_checkpoint(self, model, trial):
                super()._save_checkpoint(model, trial)
                folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
                save_file({"extra": torch.full((2,), float(self.state.global_step))}, folder / "extra.safetensors")

            def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
                self.extra = load_file(Path(resume_from_checkpoint) / "extra.safetensors")["extra"]

        return LoadingTrainer

    def use(trainer):
        trainer.train()
        trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-2"))
        return trainer.extra

    theirs, ours = run_both(tmp_path, loading, use=use, **SAVING)
    assert theirs.result.tolist() == ours.result.tolist() == [2.0, 2.0]
    assert all(torch.equal(value, theirs.weights[name]) for name, value in ours.weights.items())


def train_and_resume(trainer):
    """Train, resume another Trainer with other weights in the middle, and return its weights and rates."""
    trainer.train()
    again = type(trainer)(model=Net(seed=9), args=trainer.args, train_dataset=rows())
    again.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-2"))
    return dict(again.model.state_dict()), [group["lr"] for group in again.optimizer.param_groups]


def test_a_resume_with_a_fresh_optimizer_overrides_what_loads_the_old_one(tmp_path):
    class FreshTrainer:
        def _load_optimizer_and_scheduler(self, checkpoint):
            return

    options = {"optim": "adamw_torch", "lr_scheduler_type": "linear", **SAVING}
    _, ours = run_alike(tmp_path, FreshTrainer, use=train_and_resume, **options)
    assert ours.result[1] == [0.05, 0.05]


def test_weights_are_loaded_from_a_checkpoint_by_ones_own_alone(tmp_path):
    class PartlyTrainer:
        def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
            saved = load_file(Path(resume_from_checkpoint) / "model.safetensors")
            head = {name.removeprefix("head."): value for name, value in saved.items() if name.startswith("head")}
            self.model.head.load_state_dict(head)

    _, ours = run_alike(tmp_path, PartlyTrainer, use=train_and_resume, **SAVING)
    assert not torch.equal(ours.result[0]["body.weight"], ours.weights["body.weight"])


def test_heads_are_loaded_from_a_checkpoint_that_holds_no_whole_model(tmp_path):
    class HeadsTrainer:
        def _save(self, output_dir=None, state_dict=None):
            folder = Path(output_dir or self.args.output_dir, "extra")
            folder.mkdir(parents=True, exist_ok=True)
            save_file(dict(self.model.state_dict()), folder / "heads.safetensors")

        def _load_from_checkpoint(self, resume_from_checkpoint):
            self.model.extra = nn.Linear(1, 1)  # with the weights of its file
            self.model.load_state_dict(load_file(Path(resume_from_checkpoint, "extra", "heads.safetensors")))

    def use(trainer):
        trainer.train()
        again = type(trainer)(model=WithExtra(has_it=False), args=trainer.args, train_dataset=rows())
        again.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-2"))
        return dict(again.model.state_dict())

    parts = {"model": lambda: WithExtra(has_it=True)}
    theirs, ours = run_both(tmp_path, HeadsTrainer, use=use, parts=parts, optim="adamw_torch", **SAVING)
    assert_equal(theirs, ours, but=("output_dir", "state_dict", "resume_from_checkpoint"))
    assert all(torch.equal(value, ours.weights[name]) for name, value in ours.result.items())


class WithExtra(Net):
    def __init__(self, has_it):
        super().__init__()
        if has_it:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                self.extra = nn.Linear(1, 1)

    def forward(self, x, labels=None):
        return super().forward(x if not hasattr(self, "extra") else x * self.extra.weight, labels)


def test_the_best_model_is_loaded_by_ones_own(tmp_path):
    class BestTrainer:
        loaded = None

        def _load_best_model(self):
            self.loaded = Path(self.state.best_model_checkpoint).name
            state = load_file(Path(self.state.best_model_checkpoint) / "model.safetensors")
            self.model.load_state_dict(state)

    theirs, ours = run_both(
        tmp_path, BestTrainer, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, learning_rate=0.3,
        metric_for_best_model="loss", parts={"eval_dataset": lambda: rows(4, seed=1)},
        **{**SAVING, "num_train_epochs": 2},
    )  # fmt: skip
    assert_equal(theirs, ours)
    assert ours.trainer.loaded == theirs.trainer.loaded


def test_generators_that_are_not_loaded_do_not_keep_a_run_from_resuming(tmp_path):
    class ForgettingTrainer:
        def _load_rng_state(self, checkpoint):
            self.asked = Path(checkpoint).name

    def use(trainer):
        trainer.train()
        trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-2"))
        return trainer.asked

    theirs, ours = run_both(tmp_path, ForgettingTrainer, use=use, **SAVING)
    assert ours.result == theirs.result == "checkpoint-2"
    assert all(torch.equal(value, theirs.weights[name]) for name, value in ours.weights.items())


def test_a_push_that_copies_to_a_folder(tmp_path):
    class CopyingTrainer:
        def push_to_hub(self, *args, **kwargs):
            target = Path(self.args.output_dir) / "published"
            self.save_model(str(target))
            self.create_model_card(*args, **kwargs)
            return str(target)

        def create_model_card(self, *args, **kwargs):
            (Path(self.args.output_dir) / "published" / "README.md").write_text(f"# {kwargs['model_name']}\n")

    theirs, ours = run_both(tmp_path, CopyingTrainer, use=lambda trainer: trainer.push_to_hub(model_name="small"))
    assert ours.result == theirs.result == "FOLDER/published"
    same_files(theirs, ours, "published/README.md", "published/model.safetensors")


def test_checkpoints_go_to_a_folder_of_ones_own(tmp_path):
    class FolderTrainer:
        def _get_output_dir(self, trial):
            return str(Path(self.args.output_dir) / "checkpoints")

    theirs, ours = run_both(tmp_path, FolderTrainer, **SAVING)
    same_files(theirs, ours, "checkpoints/checkpoint-2/model.safetensors", "checkpoints/checkpoint-4/model.safetensors")
    assert not (ours.folder / "checkpoint-2").exists()


def test_the_state_is_saved_with_more_beside_it(tmp_path):
    class MoreTrainer:
        def save_state(self):
            super().save_state()
            (Path(self.args.output_dir) / "args.json").write_text(json.dumps({"lr": self.args.learning_rate}))

        def save_metrics(self, split, metrics, combined=True):
            super().save_metrics(split, {f"my_{name}": value for name, value in metrics.items()}, combined)

    def use(trainer):
        trainer.train()
        trainer.save_state()
        trainer.save_metrics("train", {"loss": 1.0})
        return json.loads((Path(trainer.args.output_dir) / "all_results.json").read_text())

    theirs, ours = run_alike(tmp_path, MoreTrainer, use=use)
    same_files(theirs, ours, "args.json", "train_results.json")
