"""What a Trainer writes: log entries, models, states, metrics and pushes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tr_core import saving
from tr_core.assembly import Assembly

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


class Reporting(Assembly):
    """What is logged, saved and pushed."""

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add an entry to `state.log_history` and tell the callbacks.

        Args:
            logs: names and values; `epoch` is added.
            start_time: accepted for overrides that pass it on.
        """
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write weights (safetensors), configuration and tokenizer; every rank calls, rank 0 writes."""
        self.prepare()
        saving.save_model(cast("Trainer", self), Path(output_dir or self.args.output_dir))

    def push_to_hub(self, commit_message: str = "End of training", blocking: bool = True) -> Any:
        """Save the model to `output_dir` and push it to the Hub repository that the arguments name.

        Args:
            commit_message: what the commit says.
            blocking: return when it is there; else push in the background.

        Raises:
            tr_core.plugins.PluginError: the package that pushes is not installed.
        """
        self.save_model()
        self.fire("on_push_begin")
        if not self.is_world_process_zero():
            return None
        hub = saving.find_hub(self.callback_handler.callbacks, self.args)
        return hub.push_to_hub(self.args.output_dir, commit_message=commit_message, blocking=blocking)

    def save_state(self) -> None:
        """Write `trainer_state.json` to the output folder."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(folder / "trainer_state.json")

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics readably, on the main process."""
        if self.is_world_process_zero():
            print("\n".join([f"***** {split} metrics *****", *saving.metric_lines(metrics)]))

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write metrics to `<split>_results.json`, and with `combined` into `all_results.json` too."""
        if self.is_world_process_zero():
            saving.save_metrics(Path(self.args.output_dir), split, metrics, combined)
