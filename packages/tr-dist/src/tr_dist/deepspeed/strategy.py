"""Train through DeepSpeed's engine: ZeRO divides optimizer state, gradients and parameters over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tr_dist.base import OnRanks, before_clearing, check_trainable, common_options
from tr_dist.deepspeed import configuration as configurations
from tr_dist.deepspeed.engine import (
    EngineModel,
    check_optimizer,
    given_groups,
    load_deepspeed,
    make_engine,
    read_launch_environment,
    reset_process_group,
    set_local_rank,
)
from tr_dist.deepspeed.states import (
    ShardedModel,
    ShardedOptimizer,
    clear_gradients,
    clip_gradients,
    full_state_dict,
    gathered,
    loss_scale,
    pass_early_gradients,
    replicated_model,
    skip_step,
    zero_absent_gradients,
)
from tr_dist.environment import rank_device
from tr_dist.sharded_model import broadcast_values, synced_generation

_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeed(OnRanks):
    """Data parallel training by DeepSpeed: ZeRO stage 0 (nothing divided), 1, 2 or 3, with or without offload.

    Stage 1 divides optimizer state over the ranks, stage 2 gradients too, stage 3 parameters too.

    The constructor joins the process group that the launcher's environment describes, as `tr_dist.DDP` does. The calls
    are the same, with one more: `bind_optimizer` after the optimizer is built and before the first step, because
    DeepSpeed builds its engine from model and optimizer together. The engine divides the optimizer's parameters, and
    its `param_groups` hold other tensors from then on. Learning rates and other options are set in them as before.

    In bf16 and fp16 the module itself is of that type, with float32 parameters in the optimizer. fp16 scales losses as
    the configuration says. Gradients are exchanged once a step at stages 0 and 1, and after every micro-batch at
    stages 2 and 3, whose gradients are divided. DeepSpeed syncs on the gradient norm in every step, and skips
    a step whose norm is not finite. Buffers are copied from rank 0 at the start, and local to each rank afterwards.

    Args:
        configuration: of DeepSpeed, a mapping or the path of a JSON file. Only sizes that follow from the model's
            hidden size may be `auto`. `gradient_clipping` and `scheduler` are left out: the loop handles them.
        backend: the backend for collectives; None takes gloo on the CPU and NCCL on CUDA.
        timeout_s: seconds to wait for other ranks, when joining and in each collective.
        hang_timeout_s: seconds without progress of any rank after which all are ended; see `ProcessGroup`.
        use_cpu: compute on the CPU even if there is CUDA.

    Attributes:
        device: the device of this process.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its machine, from 0.
        world_size: number of processes.
        stage: of ZeRO.
        binds_optimizer: True: the engine updates the parameters of an optimizer in its stead.
        forward_is_collective: whether a forward is an exchange between all ranks, so that each must make as many: it is
            at stage 3.

    Raises:
        ValueError: an argument or the environment does not fit this machine, or DeepSpeed is not installed.
        ConnectionError: the ranks did not find each other.
        RuntimeError: a process group exists and differs from the environment.
    """

    acts_on = frozenset({"deepspeed"})
    binds_optimizer = True

    def __init__(
        self,
        configuration: Mapping[str, Any] | str | Path,
        *,
        backend: str | None = None,
        timeout_s: float = 1800.0,
        hang_timeout_s: float | None = None,
        use_cpu: bool = False,
    ) -> None:
        self.configuration = configurations.read_configuration(configuration)
        configurations.check_configuration(self.configuration)
        self.stage = int(configurations.stage_of(self.configuration))
        self.forward_is_collective = self.stage == 3
        environment = read_launch_environment()
        device = rank_device(environment, use_cpu=use_cpu)
        precision = configurations.low_precision(self.configuration)
        if precision == "fp16" and device.type == "cpu":
            raise ValueError("fp16.enabled needs an accelerator; on the CPU use bf16 (--bf16), or neither")
        self._dtype = _DTYPES[precision]
        self._deepspeed = load_deepspeed(device)
        super().__init__(
            environment, device, precision="no", backend=backend, timeout_s=timeout_s, hang_timeout_s=hang_timeout_s
        )
        self._model: EngineModel | None = None
        self._backwards, self._is_complete = 0, False

    @classmethod
    def from_arguments(cls, args: Any) -> DeepSpeed:
        """Build from the training arguments that concern it.

        `deepspeed` is filled in from, and compared with, the arguments on batch sizes, accumulation, clipping,
        optimizer, schedule and precision. `use_cpu`, `ddp_backend`, `ddp_timeout` and `hang_timeout` are used too.

        Raises:
            ValueError: configuration and arguments disagree; the message lists where.
        """
        given = configurations.read_configuration(args.deepspeed)
        accumulating = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
        if accumulating.get("sync_each_batch") and configurations.stage_of(given):
            raise ValueError(
                "sync_each_batch=True cannot be used with ZeRO, which collects a step's gradients until it is made; "
                "leave it out of accelerator_config (stages 2 and 3 exchange gradients after each micro-batch anyway)"
            )
        configurations.check_optimizer_name(str(args.optim), configurations.stage_of(given))
        filled = configurations.fill_from_arguments(given, args, read_launch_environment().world_size)
        options = common_options(args)
        return cls(filled, **{name: options[name] for name in options if name != "precision"})

    def check_accumulation(self, number: int) -> None:
        """Refuse a loop whose number of micro-batches in a step differs from the configuration's.

        Raises:
            ValueError: the numbers differ.
        """
        own = self.configuration.get("gradient_accumulation_steps", 1)
        if own != number:
            raise ValueError(
                f"gradient_accumulation_steps={own!r} in the DeepSpeed configuration, and {number} in the loop; write "
                "the same number in both"
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Copy the weights of rank 0 to every rank, and return the module to train; at stages 0 to 2 on the device.

        Collective. Which parameters are frozen is fixed when the optimizer is bound.

        Raises:
            ValueError: the model has no trainable parameter, is wrapped already, has no values yet (meta device), or
                has no hidden size although the configuration needs it.
        """
        check_trainable(model, self.device)
        self.configuration = configurations.fill_from_model(self.configuration, model)
        broadcast_values(model, self.device)
        if self.stage < 3:
            model.to(self.device)
        else:
            synced_generation(model, self.sum, self.device)
        return EngineModel(model, self.device, self._dtype)

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Build the engine of a model and its optimizer, in place of an earlier engine. Collective.

        If the configuration has its own `optimizer`, that one updates the parameters, in the groups and with
        the learning rates of `optimizer`, and shares its state and groups.

        Raises:
            TypeError: `model` is not the result of `prepare`.
            ValueError: the optimizer cannot update flattened parameters, or has others than the model's.
            RuntimeError: the engine differs from the configuration.
        """
        inner = self._engine_model(model)
        check_optimizer(optimizer, inner.module, self.stage)
        if inner.engine is not None:
            inner.drop_engine()
        states = (getattr(p, "ds_status", None) for p in inner.module.parameters())
        if any(getattr(state, "name", None) == "INFLIGHT" for state in states):
            raise RuntimeError(
                "a forward that failed left weights half gathered (ZeRO stage 3), of which DeepSpeed makes no other "
                "engine; build the model and the Trainer again, and resume from a checkpoint"
            )
        groups = given_groups(optimizer)
        set_local_rank(self.local_rank, self.device)
        engine = make_engine(self._deepspeed, inner.module, optimizer, self.configuration, self.device)
        inner.take_engine(engine, groups)
        self._model, self._is_complete, self._is_within = inner, False, False
        self._check_engine(engine)
        if self.stage > 1 or getattr(engine.optimizer, "cpu_offload", False):
            self._keeps = f"which ZeRO stage {self.stage} holds; set per_device_train_batch_size if memory ran out"
            super().bind_optimizer(model, optimizer)
        elif self.stage:
            before_clearing(optimizer, inner.module.zero_grad)  # the optimizer has others

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        inner = getattr(model, "_orig_mod", model)
        return inner.module if isinstance(inner, EngineModel) else model

    @contextmanager
    def accumulate(self, model: nn.Module, *, sync: bool) -> Iterator[None]:
        """Run forward and backward of one micro-batch inside this context; `sync` marks the last one of a step.

        Raises:
            TypeError: `model` is not the result of `prepare`.
            RuntimeError: no optimizer was bound; the micro-batch before was the last of its step, and the step was not
                made; or, on exit with `sync`, no backward was made.
        """
        engine = self._engine(model)
        self._engine_model(model).restore_buffers()
        if self._is_complete and self.stage:
            raise RuntimeError(
                f"accumulate(sync=True) a second time without a step between: ZeRO stage {self.stage} would forget the "
                "first gradients; give sync=True with the last micro-batch of a step only"
            )
        engine.set_gradient_accumulation_boundary(sync)
        before, self._is_within = self._backwards, True
        yield
        self._is_complete = sync
        if sync and self._backwards == before:
            raise RuntimeError(
                "a micro-batch ended without a backward, so no gradient was averaged over the ranks; call "
                "backward(loss) of this strategy inside accumulate(model, sync=True)"
            )

    def autocast(self) -> AbstractContextManager[object]:
        """Return an empty context for a forward pass and its loss: the engine holds the module in its precision."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar loss, and exchange them as the stage requires; fp16 scales the loss first."""
        if self._model is None:
            raise RuntimeError("backward needs an engine: call bind_optimizer(model, optimizer) first")
        # Losses are divided by the number of micro-batches already.
        self._model.engine.backward(loss, scale_wrt_gas=False)
        self._backwards += 1

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Make the step scale gradients so that their total 2-norm is at most `max_norm`; None measures only.

        Returns:
            The norm before clipping, of the whole model, the same on every rank; infinity if it is not finite.
        """
        return clip_gradients(self._engine(model), self.stage, max_norm).to(self.device)

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients. Returns False if DeepSpeed skipped the step because of a non-finite norm, else True.

        Args:
            optimizer: the one that was bound.
            skip: scalar on the device, the same on all ranks; it is read. If it is not 0, parameters and
                optimizer state stay unchanged.
        """
        if self._model is None:
            raise RuntimeError("step needs an engine: call bind_optimizer(model, optimizer) first")
        engine, self._is_complete, self._is_within = self._model.engine, False, False
        if skip is not None and skip.item():  # sync: DeepSpeed itself syncs on the norm in each step
            skip_step(engine, self.stage)
            clear_gradients(engine.optimizer)
            return True
        pass_early_gradients(engine.optimizer)  # clipping does it too, if it was called
        if self.stage == 3:
            zero_absent_gradients(engine.optimizer)
        engine.step()
        clear_gradients(engine.optimizer)
        if self.stage:
            engine.optimizer.clip_grad = 0.0  # until the next step sets it
        return bool(engine.was_step_applied())

    def state_parts(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return the parts of a checkpoint, by name: `model`, `optimizer` if given, `scaler` under fp16.

        Divided state is saved in rows of full parameters, each rank its own, at every stage. It can be resumed
        at another stage, on another number of ranks, and by other strategies. With
        `stage3_gather_16bit_weights_on_model_save` in the configuration the model is saved in full.
        """
        inner = self._engine_model(model)
        if inner.engine is None:
            return {"model": inner.module, **({} if optimizer is None else {"optimizer": optimizer})}
        parts: dict[str, Any] = {"model": self._model_part(inner)}
        if optimizer is not None:
            is_divided = self.stage > 0
            parts["optimizer"] = ShardedOptimizer(inner, optimizer, self.stage, self.rank) if is_divided else optimizer
        if self._dtype is torch.float16:
            parts["scaler"] = loss_scale(inner.engine)
        return parts

    @contextmanager
    def gathered(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield one parameter gathered in full on every rank, to be read. Collective at stage 3."""
        with gathered(parameter):
            yield parameter.data

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state dict of the unwrapped model; at stage 3 in host memory, on rank 0 alone.

        Collective at stage 3.
        """
        module = self.unwrap(model)
        return full_state_dict(module, keep=self.rank == 0) if self.stage == 3 else module.state_dict()

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group if this object joined it; a second call does nothing.

        Args:
            failed: the run ends by an exception, so other ranks may be gone: do not wait for them.
        """
        self._model, model = None, self._model
        if model is not None and not failed:
            model.drop_engine()
        super().close(failed=failed)
        reset_process_group()

    def _engine_model(self, model: nn.Module) -> EngineModel:
        return self._prepared(model, EngineModel)

    def _engine(self, model: nn.Module) -> Any:
        engine = self._engine_model(model).engine
        if engine is None:
            raise RuntimeError(
                "DeepSpeed makes its engine of model and optimizer together: call bind_optimizer(model, optimizer) "
                "before the first micro-batch"
            )
        return engine

    def _model_part(self, inner: EngineModel) -> Any:
        if self.stage == 3:
            path = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
            return ShardedModel(inner, self.rank, whole=bool(configurations.look_up(self.configuration, path)))
        return replicated_model(inner) if self.stage else inner.module

    def _check_engine(self, engine: Any) -> None:
        """Raise if DeepSpeed silently made another engine than requested."""
        kind = type(engine.optimizer).__name__
        found = {
            "stage": int(engine.zero_optimization_stage()),
            "world size": int(cast("Any", engine).world_size),
            "rank": int(engine.global_rank),
            "divided optimizer": kind.startswith("DeepSpeedZeroOptimizer"),
        }
        wanted = {"stage": self.stage, "world size": self.world_size, "rank": self.rank}
        wanted["divided optimizer"] = self.stage > 0
        if differing := [
            f"{name} {found[name]}, not {value}" for name, value in wanted.items() if found[name] != value
        ]:
            raise RuntimeError(f"DeepSpeed made an engine ({kind}) with {'; '.join(differing)}")
