"""Make micro-batches smaller where memory runs out, with the same samples in every step."""

from __future__ import annotations

from tr_args import TrainingArguments
from tr_core.data.batches import AskedBatches
from tr_core.data.short_runs import training_batches
from tr_core.plan import make_plan
from tr_core.rollback import Rollback
from tr_core.run import Run
from tr_core.runtime.memory import free_memory, is_out_of_memory
from tr_core.snapshot import discard_step
from tr_log import get_logger

logger = get_logger("tr_core.trainer")


def reduce_batch_size(run: Run, size: int) -> None:
    """Continue from `run.position` with micro-batches of `size` samples a rank, and more of them a step.

    Raises:
        ValueError: the loader's batch size does not follow the arguments.
    """
    methods, args, strategy = run.methods, run.methods.args, run.strategy
    before, order = args.train_batch_size, run.data.order_state()
    args.gradient_accumulation_steps = args.gradient_accumulation_steps * before // size
    args.per_device_train_batch_size = args.per_device_train_batch_size // before * size
    run.watch.note_arguments(args, run.optimizer)
    loader = methods.get_train_dataloader()
    data = training_batches(loader, args, strategy.data)
    if data.samples_per_micro_batch != size * strategy.data.world_size:
        raise ValueError(
            f"auto_find_batch_size=True set per_device_train_batch_size={args.per_device_train_batch_size}, but the "
            f"loader that get_train_dataloader returned still gives {data.samples_per_micro_batch} samples a "
            "micro-batch; build it with that size, or leave auto_find_batch_size out"
        )
    data.restore_order(order, run.position.samples)
    run.data, methods.loaders["train_dataloader"] = data, loader
    run.plan = make_plan(args, data).with_max_steps(run.plan.max_steps)
    methods.state.train_batch_size = run.found_size = size
    logger.warning(
        "memory suffices for fewer than %d samples a device and micro-batch: going on from step %d with %d, and %d "
        "micro-batches a step; a step has the same samples as before",
        before,
        methods.state.global_step,
        size,
        args.gradient_accumulation_steps,
    )


def check_batch_size_search(args: TrainingArguments) -> None:
    """Raise `ValueError` if a smaller micro-batch would change which samples are used."""
    if not args.auto_find_batch_size:
        return
    reasons = []
    if args.dataloader_drop_last:
        reasons.append("dataloader_drop_last=True leaves out what does not fill a micro-batch")
    if args.overfit_batches is not None:
        reasons.append(f"overfit_batches={args.overfit_batches} is a number of micro-batches")
    if reasons:
        raise ValueError(
            f"auto_find_batch_size=True keeps the samples of every step, but {' and '.join(reasons)}: with smaller "
            "ones these would be other samples; leave one of the options out"
        )


def no_smaller(where: str) -> str:
    """Return what to do where memory runs out with one sample."""
    return (
        f"memory ran out {where} with 1 sample a device and micro-batch, so there is no smaller one; set "
        "activation_checkpointing=True, use shorter samples, a lower precision or a smaller model"
    )


def next_size(args: TrainingArguments) -> int:
    """Return the next smaller micro-batch size that divides a step."""
    size, accumulation = args.train_batch_size, args.gradient_accumulation_steps
    return next(smaller for smaller in range(size - 1, 0, -1) if size * accumulation % smaller == 0)


def find_common_size(run: Run) -> None:
    """Reduce the micro-batch until every rank can compute its gradients. Collective.

    Raises:
        RuntimeError: one sample is too many for a rank.
    """
    while True:
        fits = run.strategy.gather_objects(_fits(run))
        if all(fits):
            return
        size = run.methods.args.train_batch_size
        if size == 1:
            raise RuntimeError(no_smaller(f"on ranks {[rank for rank, fit in enumerate(fits) if not fit]}"))
        reduce_batch_size(run, next_size(run.methods.args))


def _fits(run: Run) -> bool:
    """Whether this rank can compute the gradients of the next micro-batch; the gradients are dropped.

    The model is called without its wrapper: a rank that runs out of memory would leave the others waiting.
    """
    strategy, model, scope = run.strategy, run.methods.model, run.methods.scope
    position = run.position
    batch = next(iter(run.data.iterate(position.epoch, position.samples)), None)
    if batch is None:
        return True
    num_items = run.count_targets([batch]) if run.count_targets else None
    if run.take_batches is not None:
        (batch,), num_items = run.take_batches(AskedBatches(iter([batch]), strategy.device), 1)
    scope.size, scope.weight, scope.inputs = run.plan.accumulation, batch.weight, batch.inputs
    model.train()
    before = Rollback(strategy.device, model)
    try:
        with scope.separate_window(strategy.data):
            run.methods.step_function(model, batch.inputs, num_items)
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        free_memory(error, strategy.device)
        return False
    finally:
        before.restore()
        discard_step(run)
