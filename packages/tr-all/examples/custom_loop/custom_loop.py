"""Train a digit classifier by a loop written by hand, which each of the packages helps in one place.

    python custom_loop.py
    torchrun --standalone --nproc-per-node 2 custom_loop.py --output_dir outputs/two

Stop it at any instant, even with kill -9, and give the same command again: it goes on from its last checkpoint and ends
with the same weights, to the bit. There is no Trainer here, and each package can be taken out without the others.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from digit_batches import read_digits, rows_of_step
from loop_state import Events, LoopState
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from tr_args import ArgumentParser
from tr_ckpt import Checkpointer, RNGState
from tr_core import get_scheduler, set_seed
from tr_dist import DDP
from tr_log import EventsFile, MetricsFile, ProgressCallback, ReportFile, configure, get_logger
from tr_optim import Adafactor, parameter_groups

_ABOUT = "Train a digit classifier by a loop written by hand, which each of the packages helps in one place."
logger = get_logger(__name__)


@dataclass
class Options:
    """The run."""

    output_dir: str = "outputs/custom_loop"
    """Folder for checkpoints, metrics and the model."""

    steps: int = 500
    """Optimizer steps."""

    batch_size: int = 32
    """Samples a step, over all processes."""

    micro_batches: int = 2
    """Parts in which each process computes its share of a step; their gradients add up."""

    learning_rate: float = 3e-3
    """Peak learning rate of the features; that of the classifier on top is twice as high."""

    weight_decay: float = 0.01
    """Weight decay of what is neither a bias nor a norm."""

    dropout: float = 0.2
    """Share of the features left out at random."""

    log_steps: int = 50
    """Steps between two log entries."""

    save_steps: int = 50
    """Steps between two checkpoints."""

    seed: int = 42
    """Of the weights, the order of the data, and dropout."""

    def __post_init__(self) -> None:
        """Refuse what no loop can do; the parser tells it as it tells its own complaints."""
        for name in ("steps", "batch_size", "micro_batches", "log_steps", "save_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.save_steps % self.log_steps:
            raise ValueError(
                f"save_steps={self.save_steps} must be a multiple of log_steps={self.log_steps}: checkpoints do not "
                "hold the losses that are still to be logged"
            )


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and test; returns the test metrics.

    Args:
        argv: the arguments; None takes this program's.
    """
    (options,) = ArgumentParser(Options, description=_ABOUT).parse_args_into_dataclasses(argv)
    with DDP() as strategy:  # alone without a launcher
        configure(level="info" if strategy.rank == 0 else "warning", rank=strategy.rank, world_size=strategy.world_size)
        return Run(options, strategy).train()


class Run:
    """One run: its model, its data and its place in them.

    Args:
        options: how to train.
        strategy: the processes it runs on.

    Raises:
        ValueError: the batch cannot be shared out evenly.
    """

    def __init__(self, options: Options, strategy: DDP) -> None:
        self.options, self.strategy = options, strategy
        parts = strategy.world_size * options.micro_batches
        if options.batch_size % parts:
            raise ValueError(
                f"batch_size={options.batch_size} cannot be shared out among {strategy.world_size} processes with "
                f"{options.micro_batches} micro-batches each; give a multiple of {parts}"
            )
        images, labels = read_digits()
        is_test = torch.arange(len(labels)) % 10 == 9
        self.train_data, self.test_data = (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])
        set_seed(options.seed)
        self.network = network(options.dropout)
        self.model = strategy.prepare(self.network)
        groups = parameter_groups(
            self.network, options.weight_decay, lr_by_pattern={"^head": 2 * options.learning_rate}
        )
        self.optimizer = Adafactor(groups, lr=options.learning_rate, scale_parameter=False, relative_step=False)
        self.schedule = get_scheduler("cosine", self.optimizer, options.steps // 10, options.steps)
        set_seed(options.seed + strategy.rank)  # from here on ranks differ, so that dropout does
        passes = -(-options.steps * options.batch_size // len(self.train_data[0]))
        self.state = LoopState(options.steps, passes, strategy.rank == 0)
        self.checkpointer = Checkpointer(
            options.output_dir,
            keep_last=2,
            rank=strategy.rank,
            world_size=strategy.world_size,
            gather_objects=strategy.gather_objects,
        )
        # Everything that the rest of the run depends on. The order of the data is not among it: it is computed.
        self.parts = {
            "model": self.network,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "rng": RNGState(),
            "loop": self.state,
        }

    def train(self) -> dict[str, float]:
        """Go on from the last checkpoint to the end, test, and write the results."""
        options, state = self.options, self.state
        if (restored := self.checkpointer.restore(self.parts)) is not None:
            logger.info("going on from step %d", restored)
        events = Events([MetricsFile(), EventsFile(), ProgressCallback(), ReportFile()], options.output_dir, state)
        loss_sum = torch.zeros((), device=self.strategy.device)
        events.fire("on_train_begin")
        try:
            while state.global_step < options.steps:
                loss_sum += self.step()
                events.fire("on_step_end")
                if state.global_step % options.log_steps == 0:
                    mean = self.strategy.sum(loss_sum).item() / self.strategy.world_size / options.log_steps  # sync
                    events.log({"loss": mean, "learning_rate": float(self.schedule.get_last_lr()[0])})
                    loss_sum.zero_()
                if state.global_step % options.save_steps == 0:
                    self.checkpointer.save(state.global_step, self.parts)
                    events.fire("on_save")
        finally:
            events.fire("on_train_end", error=sys.exception())
        return self.finish()

    def step(self) -> torch.Tensor:
        """Make one optimizer step; returns the mean loss of this process's share, on the device."""
        options, strategy, loss_sum = self.options, self.strategy, torch.zeros((), device=self.strategy.device)
        images, labels = self.train_data
        rows = rows_of_step(self.state.global_step, options.batch_size, len(labels), options.seed)
        own = rows[strategy.rank :: strategy.world_size].chunk(options.micro_batches)
        self.model.train()
        for number, part in enumerate(own, start=1):
            with strategy.accumulate(self.model, sync=number == options.micro_batches):
                with strategy.autocast():
                    logits = self.model(images[part].to(strategy.device))
                    loss = F.cross_entropy(logits, labels[part].to(strategy.device)) / options.micro_batches
                strategy.backward(loss)
            loss_sum += loss.detach()
        strategy.clip_grad_norm(self.model, self.optimizer, 1.0)
        strategy.step(self.optimizer)
        self.schedule.step()
        self.optimizer.zero_grad()
        self.state.global_step += 1
        return loss_sum

    @torch.no_grad()
    def finish(self) -> dict[str, float]:
        """Test on the digits that were not trained on, each process on its share, and write what came out."""
        self.model.eval()
        images, labels = (data[self.strategy.rank :: self.strategy.world_size] for data in self.test_data)
        right = self.network(images.to(self.strategy.device)).argmax(-1) == labels.to(self.strategy.device)
        count = self.strategy.sum(right.sum()).item()  # sync: once a run
        metrics = {"test_accuracy": count / len(self.test_data[1])}
        if self.state.is_world_process_zero:
            folder = Path(self.options.output_dir)
            save_file(self.network.state_dict(), folder / "model.safetensors")
            (folder / "all_results.json").write_text(json.dumps(metrics) + "\n", encoding="utf-8")
            logger.info("test accuracy %.4f of %d digits", metrics["test_accuracy"], len(self.test_data[1]))
        return metrics


def network(dropout: float) -> nn.Sequential:
    """Return two convolutions and a classifier, `features` and `head`."""
    features = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout),
    )  # fmt: skip
    return nn.Sequential(OrderedDict(features=features, head=nn.Linear(32 * 7 * 7, 10)))


if __name__ == "__main__":
    main()
