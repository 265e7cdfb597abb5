"""Run captures of steps: on a CPU compiled, or one operation after the other; on CUDA as graphs.

On a CPU the forward, the backward and the clipping are compiled by inductor, if there is a C++ compiler. Without one
the captured operations run one by one, which gives the bits of the ordinary step. On CUDA a full step is one launch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from tr_core.capture.parts import Gradients, Update, why_of
from tr_core.capture.values import NotCapturableError, Tensors

Call = Callable[..., Any]


def cpp_compiler() -> str | None:
    """Return the C++ compiler that inductor would call; None if there is none."""
    names = (os.environ.get("CXX"), "g++", "clang++", "c++", "cl")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compiled(captured: Any, inputs: Sequence[torch.Tensor]) -> Call:
    """Compile a capture by inductor, with the random numbers of the ordinary operations.

    Raises:
        NotCapturableError: there is no compiler, it failed, or it takes random numbers of its own.
    """
    if cpp_compiler() is None:
        raise NotCapturableError("there is no C++ compiler (g++ or clang++)")
    if torch.__version__ < "2.7":  # compares versions
        raise NotCapturableError(
            f"inductor of torch {torch.__version__} draws other random numbers than the ordinary step; take 2.7"
        )
    try:
        import torch._inductor as inductor
        from torch._inductor import config

        settings = {"fallback_random": True, "emulate_precision_casts": True, "compile_threads": 1}
        known = {name: value for name, value in settings.items() if hasattr(config, name)}
        with config.patch(known), torch.no_grad():
            return cast("Call", inductor.compile(captured, [tensor.detach() for tensor in inputs]))
    except Exception as error:
        raise NotCapturableError(f"inductor failed: {why_of(error)}") from error


class CudaGraph:
    """Operations on fixed tensors, captured as a CUDA graph.

    Args:
        inputs: the tensors; `run` reads and writes the same memory.
        pool: memory that several graphs share, which never run at the same time.

    Raises:
        NotCapturableError: the capture failed.
    """

    def __init__(self, function: Call, inputs: Tensors, pool: Any) -> None:
        device = inputs[0].device
        generator = torch.cuda.get_rng_state(device)
        try:
            stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream), torch.no_grad():  # on copies: warming up changes nothing
                copies = {id(tensor): tensor.detach().clone() for tensor in inputs}
                function(*(copies[id(tensor)] for tensor in inputs))
            current.wait_stream(stream)
            torch.cuda.set_rng_state(generator, device)
            self._graph = torch.cuda.CUDAGraph()
            # Other threads, as that which pins batches, may call CUDA meanwhile.
            with torch.no_grad(), torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self.outputs: Tensors = list(function(*inputs))
        except Exception as error:
            raise NotCapturableError(f"the capture failed: {why_of(error)}") from error
        finally:
            torch.cuda.set_rng_state(generator, device)

    def run(self) -> Tensors:
        """Run the operations; the results are overwritten by the next run of any graph of the pool."""
        self._graph.replay()
        return self.outputs


class CapturedStep:
    """The captured parts of one kind of step.

    Args:
        update: the update; None if it is an ordinary one.

    Attributes:
        places: the tensors that it was made of, as `StepCapture` compares them.
        holds: objects that are compared by their identity, which would be another's if they were gone.
    """

    how = ""
    places: tuple[Any, ...] = ()
    holds: Any = None

    def __init__(self, gradients: Gradients, update: Update | None) -> None:
        self.gradients, self.update = gradients, update

    def continues(self, first: CapturedStep) -> bool:
        """Whether the step may begin with a micro-batch of `first` and go on with one of this capture."""
        same = self.gradients.with_gradient == first.gradients.with_gradient
        return same and (self.update is None) == (first.update is None)

    def run(self, state: Tensors, batch: Tensors) -> Tensors:
        """Run a micro-batch; return the loss, the norm if the gradients are clipped, and the gradients."""
        raise NotImplementedError

    def keep(self, gradients: Tensors) -> Tensors:
        """Return gradients that the next run does not overwrite."""
        raise NotImplementedError

    def run_update(self, gradients: Tensors, rates: Tensors) -> torch.Tensor | None:
        """Apply gradients; return their norm, if this clips them."""
        raise NotImplementedError


class OnCpu(CapturedStep):
    """A capture on the CPU."""

    def __init__(self, gradients: Gradients, update: Update | None, state: Tensors, batch: Tensors) -> None:
        super().__init__(gradients, update)
        self._call, self.how = gradients.captured.forward, "its operations run one by one"
        try:
            if len({tensor.untyped_storage().data_ptr() for tensor in state if tensor.numel()}) < len(state):
                raise NotCapturableError("parameters or buffers share memory")
            self._call, self.how = compiled(gradients.captured, [*state, *batch]), "compiled by inductor"
        except NotCapturableError as why:
            self.how = f"{self.how}, not compiled: {why}"

    def run(self, state: Tensors, batch: Tensors) -> Tensors:
        """Run a micro-batch."""
        with torch.no_grad():
            return list(self._call(*state, *batch))

    def keep(self, gradients: Tensors) -> Tensors:
        """Return the gradients: each run makes new ones."""
        return gradients

    def run_update(self, gradients: Tensors, rates: Tensors) -> torch.Tensor | None:
        """Apply gradients."""
        update = cast("Update", self.update)
        with torch.no_grad():
            found = update.captured.forward(*update.parameters, *gradients, *update.states, *rates)
        return found[0] if found else None


class OnCuda(CapturedStep):
    """A capture as CUDA graphs: one for a full step, or one for a micro-batch and one for the update.

    Args:
        pool: memory that all graphs of a run share.
    """

    how = "CUDA graph"

    def __init__(
        self,
        gradients: Gradients,
        update: Update | None,
        state: Tensors,
        batch: Tensors,
        rates: Tensors,
        pool: Any,
    ) -> None:
        super().__init__(gradients, update)
        self._batch = [tensor.clone() for tensor in batch]
        number, size = len(state) + len(batch), len(gradients.with_gradient)
        held = [] if update is None else [*update.parameters, *update.states, *rates]

        def full_step(*tensors: torch.Tensor) -> Tensors:
            loss, norm, *found = gradients.captured(*tensors[:number])
            rest = tensors[number:]
            cast("Update", update).captured(*rest[:size], *found, *rest[size:])
            return [loss, norm]

        if gradients.clips:
            # The state of the model and what the update changes are the same tensors, and so are their copies.
            self._graph = CudaGraph(full_step, [*state, *self._batch, *held], pool)
            return
        self._graph = CudaGraph(gradients.captured, [*state, *self._batch], pool)
        if update is not None:
            self._kept = [torch.empty_like(parameter) for parameter in update.parameters]
            tensors = [*update.parameters, *self._kept, *update.states, *rates]
            self._update_graph = CudaGraph(update.captured, tensors, pool)

    def run(self, state: Tensors, batch: Tensors) -> Tensors:
        """Run a micro-batch, and the update if the graph holds it."""
        for own, given in zip(self._batch, batch, strict=True):
            own.copy_(given, non_blocking=True)
        loss, *rest = self._graph.run()
        return [loss.clone(), *rest]

    def keep(self, gradients: Tensors) -> Tensors:
        """Copy the gradients to where the graph of the update reads them."""
        torch._foreach_copy_(self._kept, gradients)
        return self._kept

    def run_update(self, gradients: Tensors, rates: Tensors) -> torch.Tensor | None:
        """Apply the gradients that `keep` returned."""
        if gradients is not self._kept:  # the step began with a micro-batch of another shape
            torch._foreach_copy_(self._kept, gradients)
        found = self._update_graph.run()
        return found[0] if found else None
