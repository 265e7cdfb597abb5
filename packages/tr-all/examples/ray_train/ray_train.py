"""Train on several workers of a Ray cluster, or of this machine: Ray Train starts them, the Trainer does the rest.

    python ray_train.py
    python ray_train.py --num_workers 4 --storage_path /shared/runs --max_failures 3

Shows: `TorchTrainer` runs a function on each worker and sets the variables of torch's launchers, by which the Trainer
knows ranks and device; what is logged is reported to Ray; workers that Ray starts again go on from the last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
from mnist_digits import Perceptron, read_samples
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tr_all import ArgumentParser, EvalPrediction, Trainer, TrainerCallback, TrainingArguments, set_seed


@dataclass
class RayArguments:
    """How Ray runs the workers."""

    num_workers: int = 2
    """Processes, over all machines of the cluster."""

    use_gpu: bool = False
    """Give each worker a GPU."""

    storage_path: str = "outputs/ray_train"
    """Folder for checkpoints and results, which all machines share."""

    max_failures: int = 1
    """How often Ray starts the workers again after one has failed."""

    num_train_epochs: float = 3
    """Passes over the data."""

    fail_at: int = 0
    """Let the last worker fail at this step of the first attempt, to see Ray start all of them again; 0 is never."""


class RayReport(TrainerCallback):
    """Report what is logged to Ray, which waits for all workers: all of them call it, with the same entries."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Report the entry's numbers."""
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        ray.train.report({**numbers, "step": state.global_step})


class FailOnce(TrainerCallback):
    """Fail in the last worker at a step, if the training began at step 0.

    Args:
        step: when; 0 is never.
    """

    def __init__(self, step: int) -> None:
        self.step, self.began_at = step, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the training begins."""
        self.began_at = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise at the step."""
        if state.global_step == self.step and self.began_at == 0 and args.process_index == args.world_size - 1:
            raise RuntimeError(f"this worker was asked to fail at step {self.step}")


def train_on_worker(config: dict[str, Any]) -> None:
    """Train and test in one of the workers.

    Args:
        config: `output_dir`, `num_train_epochs`, `use_cpu` and `fail_at`.
    """
    set_seed(42)
    samples = read_samples()
    args = TrainingArguments(
        output_dir=config["output_dir"],
        num_train_epochs=config["num_train_epochs"],
        use_cpu=config["use_cpu"],
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        logging_steps=50,
        eval_strategy="epoch",
        save_steps=50,
        save_total_limit=2,
        disable_tqdm=True,
    )
    trainer = Trainer(
        Perceptron(),
        args,
        train_dataset=samples["train"],
        eval_dataset=samples["test"],
        compute_metrics=accuracy,
        callbacks=[RayReport(), FailOnce(config["fail_at"])],
    )
    trainer.train(resume_from_checkpoint="auto")
    results = trainer.evaluate()
    trainer.save_metrics("test", results)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of digits that were recognised."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train on Ray's workers, and return the test metrics.

    Args:
        argv: the arguments; None takes this program's.
    """
    (given,) = ArgumentParser((RayArguments,), description="Train on workers of Ray.").parse_args_into_dataclasses(argv)
    folder = Path(given.storage_path).resolve()
    config = {
        "output_dir": str(folder / "trainer"),
        "num_train_epochs": given.num_train_epochs,
        "use_cpu": not given.use_gpu,
        "fail_at": given.fail_at,
    }
    TorchTrainer(
        train_on_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=given.num_workers, use_gpu=given.use_gpu),
        run_config=RunConfig(
            name="ray", storage_path=str(folder), failure_config=FailureConfig(max_failures=given.max_failures)
        ),
    ).fit()
    results = json.loads((folder / "trainer" / "test_results.json").read_text())
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
