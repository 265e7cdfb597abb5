"""Send a run's log entries to MLflow."""

from __future__ import annotations

import re
from typing import Any

from tr_log.loggers import get_logger
from tr_log.tracker import Tracker, missing_package, run_name, settings

logger = get_logger(__name__)

PARAMETERS_A_REQUEST = 100
LONGEST_PARAMETER = 500
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MLflowTracker(Tracker):
    """A trainer callback that records in an MLflow run.

    A run that the script has started is used and left open. Otherwise the tracker starts one called `run_name` and ends
    it with the training: as failed if the training failed, as killed if a signal stopped it. A later evaluation opens
    it again. MLflow's own environment variables set everything else (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...).

    Characters that MLflow refuses in names become `_`: `eval_f1@5` is `eval/f1_5`. MLflow keeps every value: if a
    resumed run records in the run of the first one (MLFLOW_RUN_ID), repeated steps have two, the resumed run's last.

    Raises:
        ImportError: the package mlflow is not installed.
    """

    name = "mlflow"

    def __init__(self) -> None:
        super().__init__()
        try:
            import mlflow
        except ImportError as error:
            raise missing_package("mlflow", "mlflow") from error
        self._mlflow: Any = mlflow
        self._run_id: str | None = None
        self._is_own = False
        self._status = "FINISHED"
        self._is_stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Start a new run, separate from that of an earlier training."""
        self._end(failed=False)
        self._run_id, self._status = None, "FINISHED"
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_train_end(
        self, args: Any, state: Any, control: Any, error: BaseException | None = None, **kwargs: Any
    ) -> None:
        """End a run that this tracker started."""
        self._is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        super().on_train_end(args, state, control, error=error, **kwargs)

    def open(self, args: Any, state: Any, model: Any) -> None:
        """Start a run, reopen this training's run, or use the active one."""
        active = self._mlflow.active_run()
        self._is_own = active is None
        if self._run_id is not None and active is None:
            self._mlflow.start_run(run_id=self._run_id)
            return
        run = self._mlflow.start_run(run_name=run_name(args, state)) if active is None else active
        self._run_id = run.info.run_id
        self._log_settings(settings(args, model))

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Log numbers at the step."""
        self._mlflow.log_metrics({_NOT_IN_NAMES.sub("_", name): numbers[name] for name in numbers}, step=step)

    def close(self, *, failed: bool) -> None:
        """End a run that this tracker started."""
        if failed:
            self._status = "KILLED" if self._is_stopped else "FAILED"  # also after a later evaluation
        if self._is_own:
            self._mlflow.end_run(self._status)

    def _log_settings(self, known: dict[str, Any]) -> None:
        # A resumed or a script's own run may have some already, and refuses another value together with all others.
        kept = self._mlflow.get_run(self._run_id).data.params
        texts = {name: str(value)[:LONGEST_PARAMETER] for name, value in known.items()}
        if changed := sorted(name for name in texts if kept.get(name, texts[name]) != texts[name]):
            logger.info("the run of mlflow keeps the values that it has of %s", ", ".join(changed))
        items = [(name, text) for name, text in texts.items() if name not in kept]
        for first in range(0, len(items), PARAMETERS_A_REQUEST):
            try:
                self._mlflow.log_params(dict(items[first : first + PARAMETERS_A_REQUEST]))
            except self._mlflow.exceptions.MlflowException as error:  # such as a name that it refuses
                self._report(error)
