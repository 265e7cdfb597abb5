"""Replay a step of a run, and find the samples that spoil it (`trainer blame`)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_core import loss_look
from tr_core.changes import assigned
from tr_core.checkpoint.restoring import source_of
from tr_core.checkpoint.saving import build_checkpointer, in_folder
from tr_core.data.left_out import Remaining, add_to_list
from tr_core.data.sampler import Batch
from tr_core.data.short_runs import folder_of_replayed
from tr_core.model_io import IGNORED_TARGET, local_shard, main_input_name, rows_of

LEAST = 16
"""Number of samples of a step from which on a loss can be a spike among them."""
_DEVIATION, _NARROWEST = 1.4826, 1e-3  # as for the losses of steps in `tr_core.rewind`
_SHOWN = 10


class StepReachedError(Exception):
    """Raised when the step that is replayed is over."""


@dataclass
class Sample:
    """What is known of one sample of the step.

    Attributes:
        index: in the data set; None if it is unknown.
        place: in the order of the epoch, from 0.
        loss: of this sample alone; None if it has no target.
        output: the first module whose output is not finite, in words; empty without one.
        gradient: the first gradient that is not finite, in words.
        tensors: a line on each of its tensors.
        text: its input, decoded.
    """

    index: int | None
    place: int
    rank: int
    micro_batch: int
    loss: float | None
    output: str
    gradient: str
    tensors: list[str]
    text: str = ""
    deviations: float = 0.0

    @property
    def why(self) -> str:
        """What is not finite; empty if all is."""
        if self.loss is None or (math.isfinite(self.loss) and not self.gradient):
            return ""
        where = self.output if not math.isfinite(self.loss) else self.gradient
        return f"its loss is {self.loss:g}; {where or 'all outputs of modules are finite'}"


@dataclass
class Replay:
    """The step that is replayed, as this rank computes it.

    Attributes:
        number: of the step, from 1, as in the log.
        samples: those of this rank, and at the end of all.
        begin: epoch and sample at which the step begins.
        losses: shares of the step's loss on this rank.
        not_finite: of each whole micro-batch, what is not finite of outputs, and of gradients.
    """

    trainer: Any
    number: int
    samples: list[Sample] = field(default_factory=list)
    begin: tuple[int, int] = (0, 0)
    losses: list[float] = field(default_factory=list)
    not_finite: list[tuple[str, str]] = field(default_factory=list)
    shares: list[Any] | None = None
    alone: bool = False

    def observing(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a step function that looks at each sample first, in the step that is replayed."""

        def observed(model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> torch.Tensor:
            trainer = self.trainer
            if trainer.state.global_step != self.number - 1:
                return step(model, inputs, num_items)
            if trainer.scope.number == 1:
                self._begin()
            self._look_at_samples(model, inputs)
            with _watching(trainer.model) as seen:
                loss = step(model, inputs, num_items)
            self.losses.append(loss.item())  # sync: a replay reads what it reports
            self.not_finite.append((seen["output"], _bad_gradient(trainer.model, seen)))
            if trainer.scope.number == trainer.scope.size:
                raise StepReachedError
            return loss

        return observed

    def _begin(self) -> None:
        trainer, run = self.trainer, self.trainer.current_run
        if run.recovery is not None:
            run.recovery.check()  # an earlier step that is left out by the run is left out here
        self.samples, self.losses, self.not_finite = [], [], []
        self.begin = (run.position.epoch, run.position.samples)
        find = getattr(run.data, "samples_of", None)
        self.shares = None if find is None else find(run.position.samples, trainer.scope.size)
        bad = next((f"weights of {name}" for name, p in trainer.model.named_parameters() if not _is_finite(p)), "")
        if bad := next(filter(None, trainer.strategy.gather_objects(bad)), ""):
            raise ValueError(
                f"{bad} are not finite before step {self.number}: an earlier one spoilt the run; blame that"
            )

    def _look_at_samples(self, model: nn.Module, inputs: Any) -> None:
        """Compute each sample of a micro-batch alone. Collective: ranks make as many forwards."""
        trainer, scope, data = self.trainer, self.trainer.scope, self.trainer.strategy.data
        number, first = scope.number - 1, self.trainer.current_run.position.samples
        indices, weight = None, scope.weight
        if self.shares is not None:
            share, indices = self.shares[number]
            first = share.start
        pieces = self._pieces(inputs, indices)
        most = data.all_reduce_max([len(pieces)])()[0]
        kept, rollback = (scope.weight, scope.total, scope.size), loss_look.rollback_of(trainer, model)
        gradients = [(p, p.grad) for p in trainer.model.parameters()]
        for place in range(most):
            piece = pieces[min(place, len(pieces) - 1)]
            for parameter, _ in gradients:
                parameter.grad = None
            scope.size, scope.weight = 1, 1.0
            sample = self._alone(model, piece)
            rollback.restore()
            if place < len(pieces) and weight:
                own = None if indices is None else self._own_index(indices[place])
                sample.index, sample.place, sample.micro_batch = own, first + place, number + 1
                self.samples.append(sample)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        scope.weight, scope.total, scope.size = kept

    def _own_index(self, index: int) -> int:
        dataset = self.trainer.train_dataset
        return int(dataset.indices[index]) if isinstance(dataset, Remaining) else index

    def _pieces(self, inputs: Any, indices: Sequence[int] | None) -> list[Any]:
        """Return a micro-batch of each sample: the batch's rows, or if it has others, each collated alone."""
        sizes = {len(tensor) for _, tensor in _tensors(inputs) if tensor.dim()}
        if len(sizes) == 1 and (indices is None or sizes == {len(indices)}):
            return [rows_of(inputs, row, row + 1) for row in range(sizes.pop())]
        fetch = getattr(self.trainer.loaders["train_dataloader"], "fetch", None)
        if indices is None or fetch is None:
            raise ValueError(
                f"the tensors of a micro-batch have {sorted(sizes)} rows, so that a sample is no row of it, and the "
                "loader is your own, which collates no sample alone: give batches with a row for each sample"
            )
        self.alone = True
        return [fetch.__getitems__(Batch([index])) for index in indices]

    def _alone(self, model: nn.Module, inputs: Any) -> Sample:
        """Compute loss and gradient of one sample."""
        trainer, strategy = self.trainer, self.trainer.strategy
        given = trainer._prepare_inputs(inputs)
        try:
            with _watching(trainer.model) as seen, strategy.accumulate(model, sync=False):
                with trainer.loss_context(), trainer.scope.separate_window(strategy.data):
                    loss, _ = trainer.loss_and_outputs(model, given)
                loss.backward()
        except Exception as error:
            raise ValueError(
                f"the model cannot compute a sample alone ({type(error).__name__}: {error}), so that none can be blamed"
            ) from error
        gradient = _bad_gradient(trainer.model, seen)
        tensors = [_line(name, tensor) for name, tensor in _tensors(inputs)]
        value = loss.item() if _has_target(inputs, trainer.label_names) else None  # sync: as above
        return Sample(None, 0, strategy.data.rank, 0, value, seen["output"], gradient, tensors, self._text(inputs))

    def _text(self, inputs: Any) -> str:
        decode = getattr(self.trainer.processing_class, "decode", None)
        name = main_input_name(self.trainer.model, self.trainer.processing_class)
        ids = inputs.get(name) if isinstance(inputs, Mapping) else None
        return "" if decode is None or ids is None else str(decode(ids[0].tolist()))


def replay(trainer: Any, asked: Mapping[str, Any], resume: Any) -> None:
    """Replay the step that `trainer blame` asks for, and write what is found to the file that it names. Collective.

    Args:
        trainer: a Trainer before its run.
        asked: `step`, the file of the `answer`, and the file of a list to `leave_out`, or None.
        resume: what `train` was given.

    Raises:
        ValueError: that cannot be done; the message says why.
    """
    folder, step = folder_of_replayed(trainer.args), asked["step"]
    if step is None:
        raise ValueError(f"give --step; {_not_finite_in_log(Path(folder))}")
    _refuse_what_is_not_replayed(trainer)
    own = trainer.has_own_checkpointer
    checkpointer = (
        trainer.checkpointer() if own else build_checkpointer(in_folder(trainer.args, folder), trainer.strategy)
    )
    before = [each for each in trainer.strategy.gather_objects(checkpointer.steps())[0] if each < step]
    given = trainer.args.resume_from_checkpoint if resume is None else resume
    source = str(checkpointer.path(before[-1])) if before else source_of(given) if given else None
    if not own:
        checkpointer.close()
    found = Replay(trainer, step)
    usual = trainer.step_of
    with assigned(trainer, step_of=lambda function: found.observing(usual(function)), save_checkpoint=lambda run: None):
        try:
            trainer._run(source, None)
        except StepReachedError:
            pass
        else:
            raise ValueError(f"step {step} is none of this run, which ends at step {trainer.state.global_step}")
    everyone = trainer.strategy.data.gather_objects((found.samples, sum(found.losses), found.not_finite))
    if trainer.strategy.rank == 0:
        began = source or "the first step"
        Path(asked["answer"]).write_text(_report(found, everyone, folder, str(began), asked["leave_out"]), "utf-8")


def _refuse_what_is_not_replayed(trainer: Any) -> None:
    args, strategy = trainer.args, trainer.strategy
    reasons = (
        (trainer.overrides("training_step"), "training_step is overridden: override compute_loss"),
        (strategy.schedules_micro_batches, "pp_size computes the layers of a sample on several processes"),
        (trainer.splits_sequences, "the context of a sample is divided over processes"),
        (args.deepspeed, "DeepSpeed computes gradients of whole steps alone"),
        (args.auto_find_batch_size, "auto_find_batch_size may repeat a step: give the size that it found"),
        (args.fast_dev_run, "a fast_dev_run has no checkpoints"),
    )
    if why := next((text for is_so, text in reasons if is_so), ""):
        raise ValueError(f"the loss of each sample cannot be computed: {why}")


def _not_finite_in_log(folder: Path) -> str:
    """Return which steps had losses that are not finite, by the run's `metrics.jsonl`."""
    try:
        entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        return f"the run's log cannot be read ({error})"
    last, found = 0, []
    for entry in entries:
        if "loss" in entry:
            if not all(math.isfinite(float(entry.get(name, 0.0))) for name in ("loss", "grad_norm")):
                found.append(f"{last + 1} to {entry['step']}" if entry["step"] > last + 1 else str(entry["step"]))
            last = entry["step"]
    if not found:
        return f"all losses and gradient norms in {folder / 'metrics.jsonl'} are finite"
    more = f" and {len(found) - 3} further entries" if found[3:] else ""
    return f"steps with losses or gradient norms that are not finite, in the log: {', '.join(found[:3])}{more}"


# What is found in tensors


@contextmanager
def _watching(model: nn.Module) -> Iterator[dict[str, str]]:
    """Note in a block, in words, the first module whose output is not finite, and the first such gradient."""
    seen = {"output": "", "gradient": ""}

    def look_at_gradient(name: str, gradient: torch.Tensor) -> None:
        if not seen["gradient"] and not _is_finite(gradient):
            seen["gradient"] = f"the gradient of the output of {name} is not finite"

    def look(name: str, module: nn.Module, given: Any, named: Any, output: Any) -> None:
        for _, tensor in _tensors(output):
            if not seen["output"] and not _is_finite(tensor):
                is_own = all(_is_finite(each) for _, each in _tensors([given, named]))
                inputs = "" if is_own else ", and neither is its input"
                seen["output"] = f"the output of {name} is not finite{inputs}"
            if tensor.requires_grad:
                tensor.register_hook(partial(look_at_gradient, name))

    handles = []
    for path, module in model.named_modules():
        name = f"{path or 'the whole model'} ({type(module).__name__})"
        handles.append(module.register_forward_hook(partial(look, name), with_kwargs=True))
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code calls no new hooks
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors inside mappings, lists and tuples, with their names."""
    if isinstance(tree, torch.Tensor):
        yield name or "inputs", tree
    elif isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            yield from _tensors(value, f"{name}.{key}".lstrip("."))


def _is_finite(tensor: torch.Tensor) -> bool:
    own = local_shard(tensor.detach())
    return not (own.is_floating_point() or own.is_complex()) or bool(own.isfinite().all())  # sync: as above


def _bad_gradient(model: nn.Module, seen: Mapping[str, str]) -> str:
    """Return which gradient is not finite, the first of a module's output if one is, in words."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    found = next((f"the gradient of {name} is not finite" for name, grad in named if not _is_finite(grad)), "")
    return seen["gradient"] or found if found or not named else ""  # shards have none yet


def _has_target(inputs: Any, names: Sequence[str]) -> bool:
    """Whether a sample has a label other than that for none; its loss alone may be 0 divided by 0 otherwise."""
    labels = [inputs[name] for name in names if name in inputs] if isinstance(inputs, Mapping) else []
    return not labels or any(
        not isinstance(each, torch.Tensor) or each.is_floating_point() or bool((each != IGNORED_TARGET).any())
        for each in labels
    )


def _line(name: str, tensor: torch.Tensor) -> str:
    kind = f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    finite = tensor[tensor.isfinite()] if tensor.dtype != torch.bool else tensor.long()
    ends = f", {finite.min().item():g} to {finite.max().item():g}" if finite.numel() else ""
    bad = f", {tensor.numel() - finite.numel()} not finite" if finite.numel() < tensor.numel() else ""
    return f"{kind}{ends}{bad}"


# What is reported


def guilty_of(samples: Sequence[Sample], *, is_finite: bool, deviations: float) -> list[tuple[Sample, str]]:
    """Return the samples that spoil a step, with the reason: not finite alone, or a spike among the others.

    Args:
        samples: of all ranks; their deviations are set.
        is_finite: whether the loss and the gradients of the step are.
        deviations: by how many a spike of the loss of a step exceeds the median. That is a mean over the samples, whose
            spread is smaller by the root of their number. A sample is guilty that alone makes such a spike of it.
    """
    losses = [sample.loss for sample in samples if sample.loss is not None and math.isfinite(sample.loss)]
    median = statistics.median(losses) if losses else math.nan
    spread = statistics.median(abs(each - median) for each in losses) if losses else math.nan
    unit = max(_DEVIATION * spread, _NARROWEST * abs(median)) or 1.0
    for sample in samples:
        sample.deviations = math.nan if sample.loss is None else (sample.loss - median) / unit
    if not is_finite:
        return [(sample, sample.why) for sample in samples if sample.why]
    if len(losses) < LEAST:
        return []
    return [
        (sample, f"its loss {sample.loss:g} is {sample.deviations:.4g} deviations above the median {median:g}")
        for sample in samples
        if sample.deviations > deviations * math.sqrt(len(losses))
    ]


def _report(found: Replay, everyone: Sequence[Any], folder: str, began: str, path: str | None) -> str:
    """Return the report, and write the list of samples to leave out."""
    trainer = found.trainer
    samples = sorted((each for own, _, _ in everyone for each in own), key=lambda sample: sample.place)
    loss = sum(each for _, each, _ in everyone) / len(everyone)
    faults = [pair for _, _, pairs in everyone for pair in pairs]
    gradient = next((text for _, text in faults if text), "")
    is_finite = math.isfinite(loss) and not gradient
    guilty = guilty_of(samples, is_finite=is_finite, deviations=trainer.args.spike_deviations)
    lines = [f"step {found.number} of {folder}, replayed from {began}"]
    lines += [f"its loss is {loss:g}: {len(samples)} samples, world size {len(everyone)}, epoch {found.begin[0]}"]
    lines += ["each sample was collated alone, as it is no row of its micro-batch"] if found.alone else []
    if guilty:
        lines += [f"guilty: {len(guilty)} of {len(samples)} samples"]
        for sample, why in guilty:
            lines += [f"  {_name(sample)}: {why}", *(f"    {line}" for line in sample.tensors)]
            lines += [f"    text: {sample.text!r:.200}"] if sample.text else []
        lines += _listed(trainer.train_dataset, guilty, found.number, path) if path else []
    else:
        fault = (
            gradient if math.isfinite(loss) else next((text for text, _ in faults if text), "the loss is not finite")
        )
        lines += ["no sample stands out" + ("" if is_finite else f", but {fault}: no sample alone does that")]
    lines += ["highest losses of samples alone:"]
    highest = sorted(
        samples, key=lambda sample: -math.inf if sample.loss is None else _order(sample.loss), reverse=True
    )
    for sample in highest[:_SHOWN]:
        shown = "no target" if sample.loss is None else f"loss {sample.loss:g}"
        shown += f", {sample.deviations:.3g} deviations" if math.isfinite(sample.deviations) else ""
        lines += [f"  {_name(sample)}: {shown}"]
    return "\n".join(lines)


def _order(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _name(sample: Sample) -> str:
    index = "a sample of unknown index" if sample.index is None else f"sample {sample.index}"
    return f"{index} (place {sample.place} in the order, rank {sample.rank}, micro-batch {sample.micro_batch})"


def _listed(dataset: Any, guilty: Sequence[tuple[Sample, str]], step: int, path: str) -> list[str]:
    if any(sample.index is None for sample, _ in guilty):
        return [
            "nothing is listed: the indices of the samples are unknown, as the loader is your own or the data iterable"
        ]
    known = dataset.entries if isinstance(dataset, Remaining) else []
    data = dataset.dataset if isinstance(dataset, Remaining) else dataset
    new = [{"index": sample.index, "reason": f"step {step}: {why}"} for sample, why in guilty]
    number = add_to_list(path, data, [*new, *known])
    return [f"{path} names {number} samples; leave_out_samples={path!r} trains without them"]
