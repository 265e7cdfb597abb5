"""The example of image classification, on small images that are made up."""

import json
import shutil

import augmented_digits
import numpy as np
import pytest
import torch
from augmented_digits import Augmentation, Digits
from digit_images import installed_file, read_digits, split
from image_classification import main

SETTINGS = ["--num_train_epochs", "4", "--per_device_train_batch_size", "16", "--use_cpu", "--disable_tqdm"]


@pytest.fixture
def run(digits, tmp_path, monkeypatch):
    """Run the script in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(folder, *words):
        return main([*SETTINGS, "--output_dir", folder, *words])

    return run


def steps_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["global_step"]


def test_it_learns_and_writes_the_accuracy_on_images_it_has_not_seen(run, tmp_path):
    metrics = run("out", "--num_train_epochs", "8")
    assert metrics["test_accuracy"] > 0.9
    assert json.loads((tmp_path / "out/all_results.json").read_text())["test_accuracy"] == metrics["test_accuracy"]
    assert (tmp_path / "out/model.safetensors").is_file()
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) <= 2


def test_a_resumed_run_sees_the_same_random_images_and_ends_with_the_same_weights(run, tmp_path):
    run("whole", "--save_total_limit", "9", "--patience", "9")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    whole = (tmp_path / "whole/model.safetensors").read_bytes()
    for step in (45, 60):  # as if it had been killed in the third pass of 15 steps
        shutil.rmtree(tmp_path / f"cut/checkpoint-{step}")
    (tmp_path / "cut/model.safetensors").unlink()
    run("cut", "--save_total_limit", "9", "--patience", "9", "--resume_from_checkpoint", "True")
    assert (tmp_path / "cut/checkpoint-60").is_dir()
    assert (tmp_path / "cut/model.safetensors").read_bytes() == whole


def test_it_stops_when_the_accuracy_does_not_rise_any_more(run, tmp_path):
    run("out", "--learning_rate", "0", "--patience", "2", "--num_train_epochs", "9")
    newest = max((tmp_path / "out").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    # The first pass is the best one, the second and third are no better. Statistics of the batch norms move even so.
    assert 3 * 15 <= steps_of(newest) < 9 * 15


def test_augmentation_draws_from_torchs_generator_alone():
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    first, second = Augmentation()(images), Augmentation()(images)
    torch.manual_seed(0)
    assert torch.equal(Augmentation()(images), first)
    assert not torch.equal(second, first)
    assert not torch.allclose(first, images, atol=0.05)


def test_augmentation_by_nothing_leaves_images_as_they_are():
    images = torch.rand(4, 1, 28, 28)
    assert torch.allclose(Augmentation(degrees=0, scale=0, shift=0)(images), images, atol=1e-5)


def test_a_shift_of_half_the_width_moves_at_most_half_the_width():
    images = torch.zeros(64, 1, 28, 28)
    images[:, :, 13:15, 13:15] = 1.0
    torch.manual_seed(0)
    moved = Augmentation(degrees=0, scale=0, shift=0.25)(images)
    rows, columns = moved.sum((1, 3)), moved.sum((1, 2))
    for profile in (rows, columns):
        place = (profile * torch.arange(28)).sum(1) / profile.sum(1)
        assert (place - 13.5).abs().max() <= 7.01
        assert (place - 13.5).abs().max() > 5


def test_samples_come_with_the_pixels_from_0_to_1():
    images, labels = np.full((3, 28, 28), 255, dtype=np.uint8), np.array([5, 0, 4])
    data = Digits(images, labels)
    assert len(data) == 3
    assert data[1]["labels"] == 0
    assert data[1]["pixel_values"].shape == (1, 28, 28)
    assert data[1]["pixel_values"].max() == 1.0


def test_the_splits_share_nothing_and_hold_as_many_of_each_digit(digits):
    _, labels = read_digits(installed_file())
    places = split(len(labels))
    assert sorted(np.concatenate(list(places.values()))) == list(range(300))
    counts = {name: np.bincount(labels[rows]).tolist() for name, rows in places.items()}
    assert counts == {"train": [24] * 10, "validation": [3] * 10, "test": [3] * 10}


def test_the_batch_is_asked_for_at_once(monkeypatch):
    calls = []
    monkeypatch.setattr(augmented_digits.Augmentation, "__call__", lambda self, images: calls.append(1) or images)
    data = Digits(np.zeros((8, 28, 28), dtype=np.uint8), np.zeros(8, dtype=np.int64), Augmentation())
    assert len(data.__getitems__([1, 2, 3])) == 3
    assert calls == [1]
