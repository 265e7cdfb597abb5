"""Accept a former name of an argument wherever its current name is accepted.

`OldNames` lists the former names of training arguments. For removed arguments it says what to use instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Annotated, Any

from tr_args.constraints import Between
from tr_args.schema import schema

logger = logging.getLogger("tr_args")
_noticed: set[str] = set()


class Alias:
    """A class attribute that stands for a field under a former name.

    It can be passed to the constructor, set, read, and given in files and on command lines. The first use of
    each name in a process logs one warning. If a subclass declares a field of that name, the name means that field.

    Attributes:
        target: name of the field.
        hint: type of the former argument; None if it is the field's.
    """

    def __init__(
        self,
        target: str,
        *,
        hint: Any = None,
        write: Callable[[Any], Any] | None = None,
        read: Callable[[Any], Any] | None = None,
        gives_way: Any = None,
    ) -> None:
        """Describe the relation.

        Args:
            target: name of the field.
            hint: type of the former argument where it differs.
            write: turns a value of the former argument into one of the field.
            read: turns a value of the field into one of the former argument.
            gives_way: value of the field that says nothing where both are given; None if there is none.
        """
        self.target = target
        self.hint = hint
        self.write = write or (lambda value: value)
        self.read = read or (lambda value: value)
        self.gives_way = gives_way
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:  # otherwise `dataclass` would take it for the default of a field of this name
            raise AttributeError(self.name)
        if self._is_field_of(instance):
            if self.name not in vars(instance):
                raise AttributeError(self.name)
            return vars(instance)[self.name]
        self.notice()
        return self.read(getattr(instance, self.target))

    def __set__(self, instance: object, value: Any) -> None:
        # A field without a plain default leaves no class attribute that would override this one.
        if self._is_field_of(instance):
            vars(instance)[self.name] = value
            return
        self.notice()
        setattr(instance, self.target, self.write(value))

    def notice(self) -> None:
        """Log the newer name, once a process."""
        if self.name not in _noticed:
            _noticed.add(self.name)
            with contextlib.suppress(ValueError):  # Python's own handler raises it where stderr is closed
                logger.warning("%s is a former name and still works; the argument is called %s", self.name, self.target)

    def _is_field_of(self, instance: object) -> bool:
        return self.name in getattr(instance, "__dataclass_fields__", ())

    def type_for(self, cls: type) -> Any:
        """Return the type of this name's values in the dataclass `cls`."""
        return self.hint if self.hint is not None else schema(cls)[self.target].hint


@functools.cache
def aliases(cls: type) -> dict[str, Alias]:
    """Return the former names that the dataclass `cls` accepts, without those it declares as fields."""
    fields, declared = schema(cls), {field.name for field in dataclasses.fields(cls)}
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if value is inspect.getattr_static(cls, name) and isinstance(value, Alias)
        if name not in declared and value.target in fields
    }


# Arguments that scripts still pass and that no other argument replaces one to one. name -> what to do instead
_RETIRED = {
    "adafactor": "set optim='adafactor'",
    "dispatch_batches": "set it in accelerator_config",
    "fp16_backend": "remove it: there is one implementation of mixed precision",
    "fp16_opt_level": "remove it: mixed precision is fp16=True or bf16=True",
    "half_precision_backend": "remove it: there is one implementation of mixed precision",
    "include_inputs_for_metrics": "set include_for_metrics=['inputs']",
    "include_tokens_per_second": "set include_num_input_tokens_seen='all'",
    "push_to_hub_model_id": "set hub_model_id",
    "push_to_hub_organization": "set hub_model_id='organization/name'",
    "push_to_hub_token": "set hub_token",
    "save_safetensors": "remove it: weights are always written as safetensors",
    "sharded_ddp": "set fsdp",
    "split_batches": "set it in accelerator_config",
    "torchdynamo": "set torch_compile_backend",
    "use_mps_device": "remove it: an Apple device is used where there is one, unless use_cpu=True",
    "xpu_backend": "set ddp_backend",
}


def _as_ratio(warmup_steps: Any) -> float:
    return float(warmup_steps) if warmup_steps < 1 else 0.0


class OldNames:
    """Former names of training arguments. Each logs the current name once, and sets that argument."""

    _retired = _RETIRED

    evaluation_strategy = Alias("eval_strategy")
    gradient_checkpointing = Alias("activation_checkpointing")
    gradient_checkpointing_kwargs = Alias("activation_checkpointing_kwargs")
    group_by_length = Alias(
        "train_sampling_strategy",
        hint=bool,
        write=lambda grouped: "group_by_length" if grouped else "random",
        read=lambda strategy: strategy == "group_by_length",
    )
    no_cuda = Alias("use_cpu")
    per_gpu_eval_batch_size = Alias("per_device_eval_batch_size")
    per_gpu_train_batch_size = Alias("per_device_train_batch_size")
    warmup_ratio = Alias(
        "warmup_steps", hint=Annotated[float, Between(0, 1, open_end=True)], read=_as_ratio, gives_way=0
    )
