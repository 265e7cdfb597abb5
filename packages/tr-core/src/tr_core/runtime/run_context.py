"""Apply run-wide settings while a Trainer trains or evaluates, and undo them afterwards."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import nn

from tr_args import TrainingArguments
from tr_args.fields.hardware import PrecisionFields
from tr_core.runtime.activation_checkpointing import check_checkpointing_options, checkpointed_activations
from tr_core.runtime.compilation import Compilation, check_liger
from tr_core.runtime.memory import is_out_of_memory
from tr_core.state import TrainerState
from tr_log import get_logger

logger = get_logger("tr_core.trainer")

WATCH, TPU_METRICS = "underflow_overflow", "tpu_metrics_debug"
_MODULES_SHOWN = 21

# Backends of torch.compile that run a graph without AOTAutograd. They recompute checkpointed layers with new random
# numbers: gradients belong to another dropout mask than the loss.
_REDRAWING_BACKENDS = frozenset({"eager", "eager_debug", "eager_noexcept", "pre_dispatch_eager", "ts"})

# Option -> the option that it needs to take effect.
_NEEDS = {
    "activation_checkpointing_kwargs": "activation_checkpointing",
    "liger_kernel_config": "use_liger_kernel",
}


def check_conditions(args: TrainingArguments, device: torch.device) -> None:
    """Raise for settings that cannot be applied, before training."""
    check_tf32(args.tf32, device)
    check_checkpointing_options(args.activation_checkpointing_kwargs)
    if args.use_liger_kernel:
        check_liger()
    for options, switch in _NEEDS.items():
        if getattr(args, options) and not getattr(args, switch):
            raise ValueError(f"{options} has no effect alone; set {switch}=True, or leave it out")
    if TPU_METRICS in args.debug and find_spec("torch_xla") is None:
        raise ImportError(
            f"debug={TPU_METRICS!r} shows the counters of torch_xla, which is not installed; install it, or leave "
            f"{TPU_METRICS} out"
        )
    if args.activation_checkpointing and args.torch_compile and args.torch_compile_backend in _REDRAWING_BACKENDS:
        raise ValueError(
            f"torch_compile_backend={args.torch_compile_backend!r} computes activations again with another dropout "
            "mask than that of the loss, which makes gradients of activation_checkpointing=True wrong; use "
            "torch_compile_backend='aot_eager' or 'inductor', or leave one of the two out"
        )
    if WATCH in args.debug and args.torch_compile:
        raise ValueError(
            f"debug={WATCH!r} looks at what passes between modules, and torch_compile=True leaves nothing between "
            "them; leave one of the two out"
        )


class UseCache:
    """Switches `use_cache` in a model's configuration during a run; saved models have the original value."""

    def __init__(self) -> None:
        self._given: Any = None

    @contextmanager
    def switched(self, model: nn.Module, value: bool) -> Iterator[None]:
        """Set `use_cache` for a block, if the model has such a configuration."""
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", None) is None:  # nothing to switch
            yield
            return
        given = self._given = config.use_cache
        config.use_cache = value
        try:
            yield
        finally:
            config.use_cache = given
            self._given = None

    @contextmanager
    def original(self, model: nn.Module) -> Iterator[None]:
        """Restore the original `use_cache` for a block: a saved model is for use, not training."""
        config: Any = getattr(model, "config", None)
        if self._given is None or config is None:
            yield
            return
        meanwhile, config.use_cache = config.use_cache, self._given
        try:
            yield
        finally:
            config.use_cache = meanwhile


_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")


def align_special_tokens(model: nn.Module, processing_class: Any) -> list[tuple[Any, str, Any]]:
    """Give a model's configurations the end, begin and padding tokens of its tokenizer.

    A tokenizer may have got new ones for this training, as the end of a turn: what the model generates must stop there.
    Other tokens that end a generation stay. What the tokenizer does not define is left as it is, and so are models
    whose configuration is not one of transformers.

    Returns:
        What was changed: object, name, value before.
    """
    is_tokenizer = hasattr(processing_class, "eos_token_id")
    tokenizer = processing_class if is_tokenizer else getattr(processing_class, "tokenizer", None)  # of a processor
    find_config = getattr(getattr(model, "config", None), "get_text_config", None)
    if find_config is None:
        return []
    generation = getattr(model, "generation_config", None)
    configs = [find_config(), *([] if generation is None else [generation])]
    new = {name: token for name in _TOKENS if isinstance(token := getattr(tokenizer, name, None), int)}
    new = {name: token for name, token in new.items() if any(token not in _listed(each, name) for each in configs)}
    before = [(each, name, getattr(each, name, None)) for each in configs for name in new]
    for each, name, value in before:
        keeps_others = name == "eos_token_id" and (each is generation or isinstance(value, list))
        others = [other for other in _listed(each, name) if other not in (None, new[name])]
        setattr(each, name, [new[name], *others] if keeps_others else new[name])
    if new:
        logger.warning(
            "the tokenizer has other special tokens than the model; its configurations have those of the tokenizer "
            "now: %s",
            ", ".join(f"{name} {token}" for name, token in new.items()),
        )
    return before


def _listed(config: Any, name: str) -> list[Any]:
    value = getattr(config, name, None)
    return value if isinstance(value, list) else [value]


@contextmanager
def training_context(
    args: TrainingArguments,
    model: nn.Module,
    device: torch.device,
    use_cache: UseCache,
    compilation: Compilation | None,
) -> Iterator[None]:
    """Surround a run: TF32, activation checkpointing, `use_cache`, watching for overflows, compiled calls.

    Micro-batch and accumulation, which a search for the batch size changes, are restored with the rest.
    """
    with ExitStack() as undo:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            undo.callback(setattr, args, name, getattr(args, name))
        undo.enter_context(tf32(args.tf32))
        undo.enter_context(use_cache.switched(model, args.use_cache))
        if args.activation_checkpointing or args.fsdp_config.get("activation_checkpointing"):
            options = args.activation_checkpointing_kwargs
            layers = undo.enter_context(checkpointed_activations(model, device, options))
            if layers:
                logger.info("activations of %d layers are computed again: %s", len(layers), ", ".join(layers))
        if WATCH in args.debug:
            undo.enter_context(overflow_watch(model))
        if compilation is not None:
            undo.enter_context(compilation.of(model, device))
        yield


@contextmanager
def evaluation_context(
    args: TrainingArguments,
    model: nn.Module,
    device: torch.device,
    label_names: list[str],
    compilation: Compilation | None,
    state: TrainerState,
    *,
    is_in_train: bool,
) -> Iterator[None]:
    """Surround an evaluation or prediction; inside training there is nothing to set up, and weights keep their type.

    Raises:
        RuntimeError: memory ran out; the message names the option to lower.
    """
    with ExitStack() as undo:
        if not is_in_train:
            undo.enter_context(tf32(args.tf32))
            if (dtype := _full_precision(args)) is not None:
                undo.enter_context(in_precision(model, dtype, label_names))
            if compilation is not None:
                undo.enter_context(compilation.of(model, device))
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise RuntimeError(
                f"memory ran out in an evaluation at step {state.global_step} with {args.eval_batch_size} "
                "samples a device and batch; lower per_device_eval_batch_size, or, if it is the predictions that do "
                "not fit, set eval_accumulation_steps, which moves them to the host"
            ) from error
    if TPU_METRICS in args.debug:
        logger.info("%s", import_module("torch_xla.debug.metrics").metrics_report())


def generation_context(compilation: Compilation | None, model: nn.Module) -> AbstractContextManager[None]:
    """Surround a generation: its calls are not compiled, because every token has another shape."""
    return nullcontext() if compilation is None else compilation.paused(model)


def _full_precision(args: PrecisionFields) -> torch.dtype | None:
    if args.bf16_full_eval:
        return torch.bfloat16
    return torch.float16 if args.fp16_full_eval else None


@contextmanager
def overflow_watch(model: nn.Module) -> Iterator[None]:
    """Check every module of a model after each of its forward passes, within the block.

    For debugging. Sync: several times for every module.

    Raises:
        FloatingPointError: a weight or an output is infinite or NaN, in a forward. The message lists the modules that
            ran last, with the extreme absolute values of weights, inputs and outputs.
    """
    seen: deque[str] = deque(maxlen=_MODULES_SHOWN)
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, given: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = names[module] or "(the model)"
        weights = dict(module.named_parameters(recurse=False))
        found = [
            *_describe("weight", weights),
            *_describe("input", {**dict(enumerate(given)), **kwargs}),
            *_describe("output", output),
        ]
        seen.append("\n".join([f"{name}: {type(module).__name__}", *(line for line, *_ in found)]))
        broken = [label for _, label, is_finite in found if not is_finite and not label.startswith("input")]
        if broken:
            raise FloatingPointError(
                f"{' and '.join(broken)} of {name} ({type(module).__name__}) not finite. The modules that ran last, "
                "with the least and the greatest absolute value:\n\n" + "\n".join(seen)
            )

    handles = [module.register_forward_hook(look, with_kwargs=True) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _describe(label: str, value: Any) -> list[tuple[str, str, bool]]:
    """Return a line, the name, and whether all is finite, for each floating-point tensor in `value`."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or not value.numel():
            return []
        least, greatest = torch.stack(value.detach().abs().aminmax()).tolist()  # sync: debugging
        is_finite = greatest < float("inf")  # neither infinite nor NaN
        return [(f"  {least:9.2e} {greatest:9.2e} {label}", label, is_finite)]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, Mapping):
        value = vars(value)
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _describe(f"{label} {key}", item)]
    if isinstance(value, list | tuple):
        return [found for number, item in enumerate(value) for found in _describe(f"{label} {number}", item)]
    return []


def has_tf32(device: torch.device) -> bool:
    """Whether a device computes in TF32: an NVIDIA GPU of compute capability 8.0 or later."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def check_tf32(allow: bool | None, device: torch.device) -> None:
    """Raise `ValueError` if TF32 is requested on a device without it."""
    if allow and not has_tf32(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise ValueError(
            f"tf32=True needs an NVIDIA GPU of compute capability 8.0 or later, and this run is on {name}; leave tf32 "
            "out"
        )


@contextmanager
def tf32(allow: bool | None) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions within the block; None leaves torch's settings."""
    if allow is None:
        yield
        return
    products, convolutions = _products(), torch.backends.cudnn.allow_tf32
    named = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    _set("high" if allow else "highest", convolutions=allow)
    try:
        yield
    finally:
        _set(products, convolutions=convolutions)
        if named is not None:
            torch.backends.cuda.matmul.fp32_precision = named


def _set(products: str, *, convolutions: bool) -> None:
    """Set both by the older interface: torch syncs the newer one with it, but not vice versa."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)  # torch 2.9
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def _products() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set through the newer interface alone; it is restored through that
        return "highest"


@contextmanager
def in_precision(model: nn.Module, dtype: torch.dtype, label_names: Sequence[str] = ()) -> Iterator[None]:
    """Cast a model to `dtype` within the block: weights, buffers and floating-point inputs.

    Afterwards the weights are bit for bit what they were. In the block an accelerator holds only the cast weights; the
    originals are in host memory. A CPU holds both.
    """
    handle = model.register_forward_pre_hook(_caster(dtype, frozenset(label_names)), with_kwargs=True)
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor, original in _parked(model, dtype):
            originals.append((tensor, original))
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        handle.remove()
        for tensor, original in originals:
            tensor.data = original.to(tensor.device)


def _parked(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor to cast, one at a time, with its copy in host memory."""
    tensors = [t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point() and t.dtype != dtype]
    sharers = Counter(_storage(tensor) for tensor in tensors)
    for tensor in tensors:
        # Moving tensors would separate those that share memory.
        is_alone = sharers[_storage(tensor)] == 1
        yield tensor, tensor.data.to("cpu") if is_alone else tensor.data


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _caster(dtype: torch.dtype, kept: frozenset[str]) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {name: value if name in kept else cast(value) for name, value in kwargs.items()}
        return tuple(map(cast, args)), named

    return cast_inputs
