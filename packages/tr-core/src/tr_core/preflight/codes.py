"""List what a preflight can find: one stable code for each kind of problem."""

from __future__ import annotations

from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "info"]


class Code(NamedTuple):
    """A kind of problem.

    Attributes:
        severity: `error` stops the run or spoils it; `warning` is most likely not meant; `info` is to be known.
        meaning: what is the matter, in a few words.
    """

    severity: Severity
    meaning: str


CODES: dict[str, Code] = {
    # Options, and the way to a Trainer
    "T001": Code("error", "an option is unknown"),
    "T002": Code("error", "an option does not take the value"),
    "T003": Code("error", "options contradict each other"),
    "T004": Code("error", "the configuration file cannot be read"),
    "T005": Code("error", "the script failed before it began to train"),
    "T006": Code("error", "the script ended without training, evaluating or predicting with a Trainer"),
    "T007": Code("error", "this version does not act on an option"),
    "T009": Code("error", "the Trainer refuses what it was given"),
    "T010": Code("info", "something cannot be known from a configuration file alone"),
    "T011": Code("error", "the script began to train with a loop of its own"),
    "T012": Code("warning", "a check could not be made"),
    # How long the run is, and what happens in it
    "T101": Code("error", "the training data gives no batch"),
    "T102": Code("error", "the length of the run is unknown"),
    "T103": Code("error", "no evaluation takes place"),
    "T104": Code("warning", "the only evaluation is that of the last step"),
    "T105": Code("error", "the warmup is not shorter than the run"),
    "T106": Code("info", "the only checkpoint is that of the last step"),
    "T107": Code("info", "no loss is logged during the run"),
    "T108": Code("warning", "much of the training data is never used"),
    # Where it is written, and where it goes on from
    "T201": Code("error", "output_dir cannot be written to"),
    "T202": Code("error", "the disk is too small for the checkpoints"),
    "T203": Code("info", "the number of checkpoints is not limited"),
    "T204": Code("error", "there is no checkpoint to resume from"),
    "T205": Code("error", "the checkpoint to resume from is damaged, lacks something or cannot be read"),
    "T206": Code("warning", "a damaged checkpoint would be skipped"),
    "T207": Code("warning", "the run to be resumed is complete"),
    "T208": Code("warning", "output_dir holds checkpoints of an earlier run"),
    # What is installed, and what the device can do
    "T301": Code("error", "no installed package offers a name"),
    "T302": Code("error", "a library that an option needs is missing"),
    "T303": Code("error", "the device or the launch environment does not allow what is asked for"),
    "T304": Code("error", "the optimizer cannot be built"),
    "T305": Code("error", "the schedule cannot be built"),
    "T306": Code("error", "the device's memory is too small"),
    # Data
    "T401": Code("error", "there is no training data"),
    "T402": Code("error", "a sample cannot be loaded"),
    "T403": Code("error", "samples cannot be made a batch"),
    "T404": Code("error", "something cannot be sent to loading processes"),
    "T405": Code("error", "a label is outside the model's classes"),
    "T406": Code("info", "data that can be read only once was not read"),
    "T407": Code("error", "the evaluation data is empty"),
    # Model, loss and gradients
    "T501": Code("error", "no parameter is trainable"),
    "T502": Code("error", "forward or backward fails"),
    "T503": Code("error", "the model gives no loss"),
    "T504": Code("error", "the loss is not one number"),
    "T505": Code("error", "the loss has no gradient"),
    "T506": Code("error", "the first loss is not finite"),
    "T507": Code("error", "the first gradient is not finite"),
    "T508": Code("warning", "trainable parameters get no gradient"),
    "T509": Code("error", "the loss grows with the number of samples"),
    "T510": Code("error", "a step's loss depends on how it is divided into micro-batches"),
    "T511": Code("info", "the loss would depend on the division into micro-batches, if there were several"),
    "T512": Code("info", "the self-test of the loss could not be made"),
    "T513": Code("error", "the model is quantized and has nothing that can be trained as it is"),
    # Metrics
    "T601": Code("error", "metric_for_best_model is not among the results"),
    "T602": Code("error", "compute_metrics fails"),
    "T603": Code("error", "the metric that is watched is not a number"),
    "T604": Code("error", "evaluation fails"),
}
