"""Node-aware logging, progress display and metric sinks for training jobs, without torch."""

from tr_log.drawings import ConfusionMatrix, Table
from tr_log.events_file import EventsFile
from tr_log.loggers import (
    capture_warnings,
    configure,
    get_logger,
    get_verbosity,
    info_once,
    process_log_level,
    set_verbosity,
    warning_once,
)
from tr_log.metrics_file import MetricsFile
from tr_log.mlflow_tracker import MLflowTracker
from tr_log.progress import progress, progress_bar
from tr_log.progress_callback import PrinterCallback, ProgressCallback
from tr_log.report.at_end import ReportFile
from tr_log.tensorboard_tracker import TensorBoardTracker
from tr_log.tracker import Tracker
from tr_log.wandb_tracker import WandbTracker

__all__ = [
    "ConfusionMatrix",
    "EventsFile",
    "MLflowTracker",
    "MetricsFile",
    "PrinterCallback",
    "ProgressCallback",
    "ReportFile",
    "Table",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "capture_warnings",
    "configure",
    "get_logger",
    "get_verbosity",
    "info_once",
    "process_log_level",
    "progress",
    "progress_bar",
    "set_verbosity",
    "warning_once",
]
