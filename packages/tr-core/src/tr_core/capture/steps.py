"""Run captured steps in place of ordinary ones, and notice when a capture does not fit any more.

`step_compile` switches this on. The first step of each kind is an ordinary one; the next is captured (`parts.py`).
A capture has values of Python built in: shapes, options of the optimizer, numbers in the modules. All of them are
compared before each micro-batch, so a change makes another kind of step. What cannot be captured is an ordinary step,
and the log says why, once for each reason.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from tr_core.capture import running
from tr_core.capture.conditions import refused
from tr_core.capture.parts import Gradients, Update
from tr_core.capture.running import CapturedStep, OnCpu, OnCuda
from tr_core.capture.values import Batch, BuiltInValues, NotCapturableError, Tensors, describe_shapes
from tr_core.model_io import to_device
from tr_core.optim.updates import Updates
from tr_core.protocols import Strategy
from tr_core.trainer_methods import TrainerMethods
from tr_log import get_logger
from tr_log.phases import doing

logger = get_logger("tr_core.trainer")

Step = Callable[..., torch.Tensor]

_MOST_CAPTURES, _MOST_MADE, _MOST_SAID, _MOST_SEEN = 4, 16, 12, 1000
_SEEN_FOR_MORE = 16  # steps of another kind before it is compiled too, which takes seconds
_BUILT_IN = (
    "the size of the step",
    "the weight of a micro-batch",
    "the loss function",
    "model_accepts_loss_kwargs",
    "loss_is_scaled_for_ga",
    "max_grad_norm",
    "why the update is an ordinary one",
    "the precision of products",
    "deterministic algorithms",
)
_LOOK_AT_GRADIENTS = ("on_micro_batch_end", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")


class _NoMetrics:
    """Takes the place of the window of metrics while a step is captured."""

    def add(self, *given: Any) -> None:
        raise NotCapturableError("log_metric is called in it, which a capture would not do again")

    add_part = add


class StepCapture:
    """Capture the micro-batches and updates of one run, and run the captures.

    Args:
        updates: gets the gradient norm of an update that a capture has applied, and does not apply it again.
        max_norm: returns what gradients are clipped to now; None for no clipping.
        off: why no step of this run can be captured; None if nothing prevents it.
    """

    def __init__(
        self,
        methods: TrainerMethods,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        updates: Updates,
        max_norm: Callable[[], float | None],
        off: str | None,
    ) -> None:
        self._methods, self._strategy, self._optimizer, self._max_norm = methods, strategy, optimizer, max_norm
        self._updates, self.num_captured = updates, 0
        self._device, self._is_cuda = strategy.device, strategy.device.type == "cuda"
        self._is_slow = not self._is_cuda and running.cpp_compiler() is not None
        self._said: set[str] = set()
        self._is_strict = methods.args.step_compile == "graph"
        self._pool: Any = None
        self._num_made = 0
        self._in_step = self._is_mixed = False
        self._last_key: tuple[Any, ...] | None = None
        self.renew(off)

    def renew(self, off: str | None) -> None:
        """Forget all captures: the model or the optimizer has other parts, or `off` says why nothing is captured."""
        if off is not None:
            self._say(off)
        self._off = off
        self._values = BuiltInValues(self._methods.model, self._optimizer)
        self._parameters = list(self._values.parameters.values())
        self._captures: dict[tuple[Any, ...], CapturedStep | None] = {}
        self._seen: dict[int, int] = {}
        self._taken: CapturedStep | None = None  # the capture of the open step's first micro-batch
        self._gradients: Tensors = []
        dtype = torch.float32 if self._is_cuda else torch.float64  # fused kernels of CUDA read no other
        self._lrs: list[Any] = [None] * len(self._optimizer.param_groups)
        self._rates = [torch.zeros((), dtype=dtype, device=self._device) for _ in self._lrs]

    def settle(self, off: str | None) -> None:
        """Forget all captures if the model or the optimizer has other parts than before."""
        now = dict(self._methods.model.named_parameters())
        modules = [id(module.__dict__) for module in self._methods.model.modules()]
        if (
            off != self._off
            or modules != self._values.modules
            or [id(p) for p in now.values()] != [id(p) for p in self._parameters]
            or len(self._lrs) != len(self._optimizer.param_groups)
        ):
            self.renew(off)

    def run(self, ordinary: Step, model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> torch.Tensor:
        """Run one micro-batch by a capture, and the update after the last; or by the ordinary step."""
        if self._off is not None:
            return ordinary(model, inputs, num_items)
        scope = self._methods.scope
        begins, self._in_step = not self._in_step, not scope.is_last
        if begins:
            self._taken, self._is_mixed = None, False
        key, leaves, capture = None, [], None
        if not self._is_mixed:
            try:
                batch = Batch(inputs)
                key, leaves = self._key(batch, num_items, begins), batch.tensors
                capture = self._capture_for(key, batch, num_items, model)
            except NotCapturableError as why:
                self._say(str(why))
        if capture is None or (self._taken is not None and not capture.continues(self._taken)):
            self._leave_captured_step()
            return ordinary(model, inputs, num_items)
        if num_items is not None:
            leaves = [*leaves, num_items]
        self._taken, first = capture, self._taken is None
        self.num_captured += 1
        return self._run(capture, leaves, is_first=first, is_last=scope.is_last)

    # Running

    def _run(self, capture: CapturedStep, leaves: Tensors, *, is_first: bool, is_last: bool) -> torch.Tensor:
        update, whole = capture.update, capture.gradients.clips
        if update is not None and is_last:
            self._set_rates()
        loss, *rest = capture.run(self._current_state(), leaves)
        if update is None:
            self._give_gradients(capture, rest, is_first=is_first)
            return loss
        if not whole:
            if is_first:
                self._gradients = capture.keep(rest)
            else:
                torch._foreach_add_(self._gradients, rest)
            if not is_last:
                return loss
            rest = [cast("torch.Tensor", capture.run_update(self._gradients, self._rates))]
        elif not self._is_cuda:  # there the graph of the gradients holds the update too
            capture.run_update(rest[1:], self._rates)
        self._updates.captured_norm = rest[0].clone() if self._is_cuda else rest[0]
        self._gradients = []
        return loss

    def _give_gradients(self, capture: CapturedStep, gradients: Tensors, *, is_first: bool) -> None:
        """Give the parameters their gradients, for an update that is an ordinary one."""
        parameters = [self._parameters[number] for number in capture.gradients.with_gradient]
        if self._is_cuda:  # the next run overwrites them
            gradients = list(torch._foreach_mul(gradients, 1.0))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if is_first or parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def _leave_captured_step(self) -> None:
        """Go on by ordinary micro-batches in a step that began with captured ones."""
        taken, self._taken, self._is_mixed = self._taken, None, True
        if taken is not None and taken.update is not None:
            self._give_gradients(taken, self._gradients, is_first=True)
        self._gradients = []

    def _set_rates(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                self._rates[number].copy_(rate, non_blocking=True)
            elif rate != self._lrs[number]:
                self._rates[number].fill_(rate)
                self._lrs[number] = rate

    def _current_state(self) -> Tensors:
        buffers = self._values.current_buffers()
        return [*self._parameters, *(buffers or [])]

    # Which capture

    def _key(self, batch: Batch, num_items: torch.Tensor | None, begins: bool) -> tuple[Any, ...]:
        """Return everything that a capture of this micro-batch would have built in.

        Raises:
            NotCapturableError: this micro-batch must be an ordinary one.
        """
        methods, scope = self._methods, self._methods.scope
        if methods.callback_handler.wants_outputs:
            raise NotCapturableError("a callback's on_micro_batch_end asks for the model's outputs")
        if (hook := self._values.hook()) is not None:
            raise NotCapturableError(hook)
        if begins and any(parameter.grad is not None for parameter in self._parameters):
            raise NotCapturableError("parameters had gradients when the step began")
        if self._values.current_buffers() is None:
            raise NotCapturableError("buffers were put into the model, or taken out of it")
        rule, scaled = methods.loss_rule, methods.loss_is_scaled_for_ga
        built_in = (scope.size, scope.weight, rule, rule.accepts_count, scaled, self._max_norm(), self._why_no_update())
        built_in += (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
        key = (batch.shapes, num_items is None, built_in, self._values.read())
        if key != self._last_key:
            if self._last_key is not None and hash(key) not in self._seen:
                what, change = self._difference(key)
                self._say(f"{change}; such steps are captured if they come again", what)
            self._last_key = key
        return key

    def _places(self) -> tuple[Any, ...]:
        """Return what shows that a tensor was replaced: on CUDA a graph reads and writes fixed memory."""
        state = self._current_state()
        if not self._is_cuda:
            return tuple((tensor.dtype, tensor.shape) for tensor in state)
        of = self._optimizer.state
        moments = [t for p in self._parameters for t in of.get(p, {}).values() if isinstance(t, torch.Tensor)]
        return tuple(tensor.data_ptr() for tensor in (*state, *moments))

    def _why_no_update(self) -> str | None:
        """Return why the update of this step must be an ordinary one; None if it can be captured."""
        updates, optimizer, handler = self._updates, self._optimizer, self._methods.callback_handler
        if updates.guard is not None:
            return "on_nonfinite is not 'log'"
        if updates.own_clip is not None:
            return "clipping is overridden"
        hooks = (vars(optimizer).get("_optimizer_step_pre_hooks"), vars(optimizer).get("_optimizer_step_post_hooks"))
        if any(hooks):
            return f"{type(optimizer).__name__} has hooks around its step"
        own = vars(optimizer).get("step")
        if own is not None and inspect.unwrap(own) is not inspect.unwrap(type(optimizer).step):
            return f"the step of {type(optimizer).__name__} was replaced"
        for event in _LOOK_AT_GRADIENTS:
            for method in handler.listeners(event):
                owner = type(getattr(method, "__self__", method))
                if not owner.__module__.startswith("tr_core.callbacks."):
                    return f"{event} of {owner.__name__} may look at gradients"
        return None

    def _capture_for(
        self, key: tuple[Any, ...], batch: Batch, num_items: torch.Tensor | None, model: nn.Module
    ) -> CapturedStep | None:
        places = self._places()
        if (known := self._captures.get(key)) is not None:
            if known.places == places and (known.update is None or known.update.is_current()):
                return known
            del self._captures[key]
            raise NotCapturableError("tensors of the model or of the optimizer were replaced, and are captured again")
        if len(self._seen) > _MOST_SEEN:
            self._seen = {}
        seen = self._seen[hash(key)] = self._seen.get(hash(key), 0) + 1
        if seen == 1:
            if self._is_strict and len(self._seen) == 1:
                self._try(key, batch, num_items, model)
            return None
        is_rare = self._is_slow and bool(self._captures) and seen < _SEEN_FOR_MORE
        rule, scaled = self._methods.loss_rule, self._methods.loss_is_scaled_for_ga
        if key in self._captures or is_rare or (num_items is not None and rule.asks(self._methods.scope.size, scaled)):
            return None
        if len(self._captures) >= _MOST_CAPTURES or self._num_made >= _MOST_MADE:
            raise NotCapturableError("too many kinds of steps are captured already")
        self._num_made += 1
        self._captures[key] = None  # if it fails
        with doing("compiling"):
            began = time.perf_counter()
            made = self._capture(key, batch, num_items, model)
        self._captures[key], made.places, made.holds = made, places, self._values.objects()
        took = time.perf_counter() - began
        logger.info("captured the step for a batch of %s in %.1f s: %s", describe_shapes(key[0]), took, made.how)
        return made

    def _try(self, key: tuple[Any, ...], batch: Batch, num_items: torch.Tensor | None, model: nn.Module) -> None:
        """Capture the first micro-batch before it is trained, only to see whether that works."""
        try:
            self._capture_gradients(key, batch, num_items, model, clips=False)
        except NotCapturableError as why:
            raise ValueError(refused(str(why))) from why

    def _capture_gradients(
        self, key: tuple[Any, ...], batch: Batch, num_items: torch.Tensor | None, model: nn.Module, *, clips: bool
    ) -> Gradients:
        methods, scope, rule = self._methods, self._methods.scope, self._methods.loss_rule
        size, weight = scope.size, scope.weight
        division = rule.division(None if num_items is None else True, size, methods.loss_is_scaled_for_ga)
        leaves = to_device([*batch.tensors, *([] if num_items is None else [num_items])], self._device)

        def loss_of(tensors: Tensors) -> torch.Tensor:
            given = tensors if num_items is None else tensors[:-1]
            count = None if num_items is None else tensors[-1]
            with methods.loss_context():
                loss = methods.compute_loss(model, batch.rebuild(given), num_items_in_batch=count)
            if not isinstance(loss, torch.Tensor):
                raise NotCapturableError("compute_loss_func returns more than a loss")
            if num_items is not None or size > 1 or weight != 1.0:
                loss = rule.share(loss, division, size, weight)
            return loss

        values, outer = self._values, scope.metrics
        buffers = dict(zip(values.buffers, self._current_state()[len(self._parameters) :], strict=True))
        scope.metrics = cast("Any", _NoMetrics())
        try:
            clip = self._clip if clips else None
            made = Gradients(methods.model, values.parameters, buffers, loss_of, leaves, clip)
        finally:
            scope.metrics = outer
        return made

    def _clip(self, parameters: Tensors) -> torch.Tensor:
        max_norm, foreach = self._max_norm(), True if self._is_cuda else None
        if max_norm is None:
            gradients = [p.grad for p in parameters if p.grad is not None]
            return nn.utils.get_total_norm(gradients, foreach=foreach)
        return nn.utils.clip_grad_norm_(parameters, max_norm, foreach=foreach)

    def _capture(
        self, key: tuple[Any, ...], batch: Batch, num_items: torch.Tensor | None, model: nn.Module
    ) -> CapturedStep:
        why, size = self._why_no_update(), self._methods.scope.size
        update: Update | None = None
        gradients = self._capture_gradients(key, batch, num_items, model, clips=False)
        if why is None:
            parameters = [self._parameters[number] for number in gradients.with_gradient]
            try:
                update = Update(self._optimizer, parameters, self._rates, self._clip if size > 1 else None)
            except NotCapturableError as reason:
                why = str(reason)
        if why is not None:
            self._say(f"the update of {type(self._optimizer).__name__} is an ordinary one: {why}", is_step=False)
        if update is not None and size == 1:
            gradients = self._capture_gradients(key, batch, num_items, model, clips=True)
        leaves = [*batch.tensors, *([] if num_items is None else [num_items])]
        state = self._current_state()
        if self._is_cuda:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            return OnCuda(gradients, update, state, to_device(leaves, self._device), self._rates, self._pool)
        return OnCpu(gradients, update, state, leaves)

    # Words

    def _difference(self, key: tuple[Any, ...]) -> tuple[str, str]:
        """Return what a key differs in from the last one, and this in words with the values."""
        before = cast("tuple[Any, ...]", self._last_key)
        if key[0] != before[0]:
            shapes = describe_shapes(key[0])
            return shapes, f"the batch is {shapes}, and the one before was {describe_shapes(before[0])}"
        pairs: list[tuple[str, Any, Any]] = [*zip(_BUILT_IN, before[2], key[2], strict=True)]
        if len(before[3]) == len(key[3]):
            pairs += zip(self._values.names(), before[3], key[3], strict=True)
        changed = [(name, f"{name} from {then} to {now}") for name, then, now in pairs if then != now]
        names, texts = zip(*changed[:3], strict=True) if changed else (["parts"], ["attributes or parts of the model"])
        return ", ".join(names), f"changed: {', '.join(texts)}"

    def _say(self, reason: str, once_for: str | None = None, *, is_step: bool = True) -> None:
        once_for = reason if once_for is None else once_for
        if once_for in self._said or len(self._said) > _MOST_SAID:
            return
        self._said.add(once_for)
        if len(self._said) > _MOST_SAID:
            reason = "there are more reasons, which are not logged any more"
        what = "is an ordinary one: " if is_step else "on, "
        logger.warning("step_compile: step %d %s%s", self._methods.state.global_step + 1, what, reason)
