"""Send a run's log entries to Weights & Biases, or store them for it without a network."""

from __future__ import annotations

from typing import Any

from tr_log.tracker import Tracker, missing_package, run_name, settings


class WandbTracker(Tracker):
    """A trainer callback that records in a wandb run.

    A run that the script has started is used and left open. Otherwise the tracker starts one called `run_name`. wandb's
    own environment variables set everything else (WANDB_PROJECT, WANDB_MODE=offline, WANDB_DIR, ...). After a training
    without an error the run stays open for evaluations, until the next training begins or the process ends.

    wandb writes its file every 15 seconds: it may lack the last entries of a killed run, which metrics.jsonl has.

    Raises:
        ImportError: the package wandb is not installed.
    """

    name = "wandb"

    def __init__(self) -> None:
        super().__init__()
        try:
            import wandb
        except ImportError as error:
            raise missing_package("wandb", "wandb") from error
        self._wandb: Any = wandb
        self._run: Any = None
        self._is_own = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Finish the run of an earlier training and open a new one."""
        if self._is_own and state.is_world_process_zero:
            self._finish(exit_code=0)
        elif not self._is_own:
            self._run = None  # the script may have finished its run and started another
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def open(self, args: Any, state: Any, model: Any) -> None:
        """Start a run, or use the active one."""
        if self._run is None:
            self._is_own = self._wandb.run is None
            self._run = self._wandb.init(name=run_name(args, state)) if self._is_own else self._wandb.run
            # A step may have several entries, and a resume goes back. wandb's own step counter refuses both.
            self._run.define_metric("train/global_step")
            self._run.define_metric("*", step_metric="train/global_step", step_sync=True)
        self._run.config.update(settings(args, model), allow_val_change=True)

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Log numbers with the step."""
        self._run.log({**numbers, "train/global_step": step})

    def close(self, *, failed: bool) -> None:
        """Mark this tracker's run as failed after a failed training; other runs stay open."""
        if failed and self._is_own:
            self._finish(exit_code=1)

    def _finish(self, exit_code: int) -> None:
        run, self._run, self._is_own = self._run, None, False
        run.finish(exit_code=exit_code)
