"""Replay a step of a run, and find the samples that spoil it (`trainer blame`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_core.changes import assigned
from tr_core.checkpoint.restoring import source_of
from tr_core.checkpoint.saving import build_checkpointer, in_folder
from tr_core.data.left_out import Remaining, add_to_list
from tr_core.data.sampler import Batch, MicroBatch
from tr_core.data.short_runs import folder_of_replayed
from tr_core.loss_look import rollback_of
from tr_core.model_io import main_input_name, rows_of
from tr_core.optim.fused_backward import kind
from tr_core.preflight.model_checks import not_finite
from tr_core.recovery import spike_limit
from tr_log import ReportFile
from tr_log.report.run_folder import RunFolder

LEAST = 16
"""Number of samples of a step from which on a loss can be a spike among them."""
_SHOWN = 10


class StepReachedError(Exception):
    """Raised when the step that is replayed is over."""


@dataclass(frozen=True)
class Sample:
    """What is known of one sample of the step.

    Attributes:
        place: in the order of the epoch, from 0.
        index: in the data set; None if it is unknown.
        name: in words.
        loss: of this sample alone; None if it has no target.
        fault: what is not finite if it is computed alone, in words; empty if all is.
        values: a line on each of its tensors, and its text.
    """

    place: int
    index: int | None
    name: str
    loss: float | None
    fault: str
    values: list[str]


def replay(trainer: Any, asked: Mapping[str, Any], resume: Any) -> None:
    """Replay the step that `trainer blame` asks for, and write what is found to the file it names. Collective.

    Args:
        trainer: a Trainer before its run.
        asked: `step`, the file of the `answer`, and the file of a list to `leave_out`, or None.
        resume: what `train` was given.

    Raises:
        ValueError: that cannot be done; the message says why.
    """
    args, strategy, step = trainer.args, trainer.strategy, asked["step"]
    folder = folder_of_replayed(args)
    if step is None or step < 1:
        raise ValueError(f"give --step, a number from 1; {_first_in_log(folder)}")
    _refuse_what_is_not_replayed(trainer)
    own = trainer.checkpointer() if trainer.has_own_checkpointer else None
    checkpointer = own or build_checkpointer(in_folder(args, folder), strategy)
    before = [each for each in strategy.gather_objects(checkpointer.steps())[0] if each < step]
    given = args.resume_from_checkpoint if resume is None else resume
    source = str(checkpointer.path(before[-1])) if before else source_of(given) if given else None
    usual = strategy.run_micro_batches

    def run_micro_batches(model: nn.Module, batches: Iterable[Any], compute: Any, inputs_of: Any, size: int) -> Any:
        if step > trainer.state.max_steps:
            raise ValueError(_none_of_run(trainer, step))
        if trainer.state.global_step < step - 1:
            return usual(model, batches, compute, inputs_of, size)
        found = _look_at_step(trainer, model, batches, compute, size)
        if strategy.rank == 0:
            head = f"step {step} of {folder}, replayed from {source or 'the first step'}"
            Path(asked["answer"]).write_text("\n".join([head, *_report(trainer, asked, *found)]), "utf-8")
        raise StepReachedError

    trainer.remove_callback(ReportFile)  # its last words are of a run that failed
    replayed = assigned(strategy, run_micro_batches=run_micro_batches)
    with suppress(StepReachedError), replayed, assigned(trainer, save_checkpoint=lambda run: None):
        trainer._run(source, None)
        raise ValueError(_none_of_run(trainer, step))


def _none_of_run(trainer: Any, step: int) -> str:
    last = max(trainer.state.global_step, trainer.state.max_steps)
    return f"step {step} is none of this run, which ends at step {last}"


def _first_in_log(folder: str) -> str:
    """Return at which step the run's log first has a number that is not finite."""
    last = 0
    for entry in RunFolder.read(Path(folder)).entries:
        if "loss" in entry:
            if not all(math.isfinite(entry.get(name, 0.0)) for name in ("loss", "grad_norm")):
                step = f"{last + 1} to {entry['step']}" if entry["step"] > last + 1 else str(entry["step"])
                return f"the first loss or gradient norm that is not finite, by the log of {folder}: step {step}"
            last = entry["step"]
    return f"all losses and gradient norms in the log of {folder} are finite"


def _refuse_what_is_not_replayed(trainer: Any) -> None:
    args, strategy = trainer.args, trainer.strategy
    reasons = (
        (trainer.overrides("training_step"), "training_step is overridden: override compute_loss"),
        (strategy.schedules_micro_batches, "pp_size computes the layers of a sample on several processes"),
        (trainer.splits_sequences, "the context of a sample is divided over processes"),
        (args.deepspeed, "DeepSpeed computes gradients of whole steps alone"),
        (args.auto_find_batch_size, "auto_find_batch_size may repeat a step: give the size that it found"),
        (
            args.elastic and (args.virtual_shards or 1) % strategy.world_size,
            "the number of processes does not divide virtual_shards: start one that does",
        ),
        (strategy.members is not None, "its processes come and go: leave --elastic of trainer launch out"),
        (args.fast_dev_run, "a fast_dev_run has no checkpoints"),
    )
    if why := next((text for is_so, text in reasons if is_so), ""):
        raise ValueError(f"the loss of each sample cannot be computed: {why}")


# What is found in the step


def _look_at_step(
    trainer: Any, model: nn.Module, batches: Iterable[Any], compute: Any, size: int
) -> tuple[list[Sample], float, list[str]]:
    """Return the samples of a step, each computed alone, its loss, and what is not finite of it. Collective."""
    run = trainer.current_run
    _refuse_spoilt_run(run)
    look: Any = partial(_samples_alone, trainer, model)
    if run.shards is not None:
        look = run.shards.seeding(look, trainer.args.seed, trainer.state.global_step, size, run.strategy.device)
    find, start = getattr(run.data, "samples_of", None), run.position.samples
    shares = None if find is None else find(start, size)
    samples, losses, faults = [], [], []
    for number, batch in enumerate(batches):
        if shares is None:
            samples += look((number, batch, start, None))
        else:
            samples += look((number, batch, shares[number][0].start, shares[number][1]))
        with _watching(trainer.model) as seen:
            losses.append(compute(batch)[1].item())  # sync: a replay reads what it reports
        faults += _fault(losses[-1], seen)
        start = batch.end
    everyone = run.strategy.data.gather_objects((samples, sum(losses), faults))
    samples = sorted((each for own, *_ in everyone for each in own), key=lambda sample: sample.place)
    number = len(everyone) if run.shards is None else run.shards.number
    return samples, sum(each for _, each, _ in everyone) / number, [each for *_, own in everyone for each in own]


def _refuse_spoilt_run(run: Any) -> None:
    if kind(run.optimizer) == "backward-update":
        name = type(run.optimizer).__name__
        raise ValueError(f"the loss of each sample cannot be computed: {name} changes weights in the backward pass")
    if run.recovery is not None:
        run.recovery.check()  # an earlier step that is left out by the run is left out here
    bad = next(filter(None, run.strategy.gather_objects(not_finite(run.methods.model.named_parameters()))), None)
    if bad:
        step = run.methods.state.global_step + 1
        raise ValueError(
            f"weights of {bad[0]} are not finite before step {step}: an earlier one spoilt the run; blame that"
        )


def _samples_alone(
    trainer: Any, model: nn.Module, given: tuple[int, MicroBatch, int, list[int] | None]
) -> list[Sample]:
    """Compute each sample of a micro-batch alone. Collective: ranks make as many forwards.

    Args:
        trainer: in the step.
        model: wrapped.
        given: the number of the micro-batch in the step, itself, its first place in the order, and its indices.
    """
    data, (number, batch, start, indices), found = trainer.strategy.data, given, []
    pieces = _pieces(trainer, batch.inputs, indices)
    rollback, size = rollback_of(trainer, model), trainer.scope.size
    trainer.scope.size = 1
    for row in range(data.all_reduce_max([len(pieces)])()[0]):
        piece = pieces[min(row, len(pieces) - 1)]
        loss, seen = _alone(trainer, model, piece)
        rollback.restore()
        if row < len(pieces) and batch.weight:
            index = None if indices is None else indices[row]
            if isinstance(trainer.train_dataset, Remaining) and index is not None:
                index = int(trainer.train_dataset.indices[index])
            name = "a sample of unknown index" if index is None else f"sample {index}"
            name = f"{name} (place {start + row} in the order, rank {data.rank}, micro-batch {number + 1})"
            targets = trainer.loss_rule.count_inputs(piece)
            has_target = targets is None or bool(targets)  # sync: as above; without one the loss is 0 divided by 0
            fault = "; ".join(_fault(loss, seen)) if has_target else ""
            values = _values(trainer, piece)
            found.append(Sample(start + row, index, name, loss if has_target else None, fault, values))
    trainer.scope.size = size
    return found


def _pieces(trainer: Any, inputs: Any, indices: Sequence[int] | None) -> list[Any]:
    """Return a micro-batch of each sample: the batch's rows, or if it has others, each collated alone."""
    sizes = {len(tensor) for _, tensor in _tensors(inputs) if tensor.dim()}
    if len(sizes) == 1 and (indices is None or sizes == {len(indices)}):
        return [rows_of(inputs, row, row + 1) for row in range(sizes.pop())]
    fetch = getattr(trainer.loaders["train_dataloader"], "fetch", None)
    if indices is None or fetch is None:
        raise ValueError(
            f"the tensors of a micro-batch have {sorted(sizes)} rows, so that a sample is no row of it, and the "
            "loader is your own, which collates no sample alone: give batches with a row for each sample"
        )
    return [fetch.__getitems__(Batch([index])) for index in indices]


def _alone(trainer: Any, model: nn.Module, inputs: Any) -> tuple[float, Mapping[str, str]]:
    """Compute loss and gradient of one sample; return the loss, and what is not finite."""
    strategy, given = trainer.strategy, trainer._prepare_inputs(inputs)
    try:
        with _watching(trainer.model) as seen, strategy.accumulate(model, sync=False):
            with trainer.loss_context(), trainer.scope.separate_window(strategy.data):
                loss, _ = trainer.loss_and_outputs(model, given)
            loss.backward()
    except Exception as error:
        raise ValueError(
            f"the model cannot compute a sample alone ({type(error).__name__}: {error}), so that none can be blamed"
        ) from error
    return loss.item(), seen  # sync: as above


@contextmanager
def _watching(model: nn.Module) -> Iterator[dict[str, str]]:
    """Note in words, in a block, the first module whose output is not finite, and the first such gradient."""
    seen = {"output": "", "gradient": ""}

    def look_at_gradient(name: str, gradient: torch.Tensor) -> None:
        if not seen["gradient"] and not_finite([(name, gradient)]):
            seen["gradient"] = f"the gradient of the output of {name} is not finite"

    def look(name: str, module: nn.Module, given: Any, named: Any, output: Any) -> None:
        if not seen["output"] and not_finite(_tensors(output)):
            inputs = ", and neither is its input" if not_finite(_tensors([given, named])) else ""
            seen["output"] = f"the output of {name} is not finite{inputs}"
        for _, tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(look_at_gradient, name))

    model.zero_grad()
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
    if gradients := [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]:  # shards have none
        bad = not_finite(gradients)
        seen["gradient"] = (seen["gradient"] or f"the gradient of {bad[0]} is not finite") if bad else ""


def _fault(loss: float, seen: Mapping[str, str]) -> list[str]:
    """Return, in words, what is not finite of a loss or its gradients, if anything is."""
    if math.isfinite(loss):
        return [f"its loss is {loss:g}; {seen['gradient']}"] if seen["gradient"] else []
    return [f"its loss is {loss:g}; {seen['output'] or 'all outputs of modules are finite'}"]


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors inside mappings, lists and tuples, with their names."""
    if isinstance(tree, torch.Tensor):
        yield name or "inputs", tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _tensors(value, f"{name}.{key}".lstrip("."))


def _values(trainer: Any, inputs: Any) -> list[str]:
    lines = []
    for name, tensor in _tensors(inputs):
        finite = tensor[tensor.isfinite()] if tensor.dtype != torch.bool else tensor.long()
        ends = f", {finite.min().item():g} to {finite.max().item():g}" if finite.numel() else ""
        bad = f", {tensor.numel() - finite.numel()} not finite" if finite.numel() < tensor.numel() else ""
        lines += [f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{ends}{bad}"]
    decode = getattr(trainer.processing_class, "decode", None)
    ids = inputs.get(main_input_name(trainer.model, trainer.processing_class)) if isinstance(inputs, Mapping) else None
    return lines if decode is None or ids is None else [*lines, f"text: {str(decode(ids[0].tolist()))!r:.200}"]


# What is reported


def _report(
    trainer: Any, asked: Mapping[str, Any], samples: Sequence[Sample], loss: float, faults: Sequence[str]
) -> Iterator[str]:
    """Yield the lines on a step and its samples, and write the list of those to leave out.

    Guilty are, if something is not finite: samples of which something is alone. Else those that make the loss of the
    step a spike: it is a mean over n losses, whose spread is smaller by the root of n.
    """
    world_size, epoch = trainer.strategy.data.world_size, trainer.current_run.position.epoch
    yield f"its loss is {loss:g}: {len(samples)} samples, world size {world_size}, epoch {epoch}"
    losses = [sample.loss for sample in samples if sample.loss is not None and math.isfinite(sample.loss)]
    guilty, spike = [(sample, sample.fault) for sample in samples if faults and sample.fault], ""
    if len(losses) >= LEAST:
        limit = spike_limit(losses, trainer.args.spike_deviations * math.sqrt(len(losses)))
        spike = f" (median {statistics.median(losses):g}; a spike is above {limit:g})"
        if not faults:
            high = [sample for sample in samples if sample.loss is not None and sample.loss > limit]
            guilty = [(sample, f"its loss is {sample.loss:g}, above {limit:g}") for sample in high]
    if guilty:
        yield f"guilty: {len(guilty)} of {len(samples)} samples"
        for sample, why in guilty:
            yield from (f"  {sample.name}: {why}", *(f"    {line}" for line in sample.values))
        if asked["leave_out"] is not None:
            yield _listed(trainer, guilty, asked["step"], asked["leave_out"])
    else:
        yield "no sample stands out" + (f" alone; of a whole micro-batch {faults[0]}" if faults else "")
    yield f"highest losses of samples alone{spike}:"
    ranked = sorted(samples, key=lambda each: (each.loss is None, not math.isnan(each.loss or 0), -(each.loss or 0)))
    for sample in ranked[:_SHOWN]:
        yield f"  {sample.name}: " + ("no target" if sample.loss is None else f"loss {sample.loss:g}")


def _listed(trainer: Any, guilty: Sequence[tuple[Sample, str]], step: int, path: str) -> str:
    if any(sample.index is None for sample, _ in guilty):
        return "nothing is listed: the samples' indices are unknown, as the loader is your own or the data iterable"
    new = [{"index": sample.index, "reason": f"step {step}: {why}"} for sample, why in guilty]
    number = add_to_list(path, trainer.train_dataset, new)
    return f"{path} names {number} samples; leave_out_samples={path!r} trains without them"
