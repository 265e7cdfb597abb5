"""A device of its own that computes on the CPU: it calls itself `cuda`, and refuses what a GPU refuses.

No GPU is needed. Its tensors are plain tensors of torch's device `meta`, which have shapes and no data; while a
`SecondDevice` is entered, their storages hold memory of the CPU, every operation is done there, and Python is told that
they are on `cuda:0`. So torch and a Trainer take the ways of a GPU, and the numbers are those of the CPU.

Unlike torch's fake tensors it raises also where only scalars are mixed, as a GPU does, and values can be read. Not
played: autocast, captured steps, figures of memory, generators with a state of their own (they have the CPU's), pinned
batches, and threads other than the one that enters it.
"""

import sys
import sysconfig
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)
_META = torch.device("meta")
_aten = torch.ops.aten

_COPIES = (_aten.copy_, _aten._to_copy, _aten._foreach_copy_)
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index, _aten._unsafe_index_put)
_READS = (_aten._local_scalar_dense, _aten.is_nonzero, _aten.equal)
_SHAPED_BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"] + "/torch")


class MixedDevices(RuntimeError):
    """An operation has tensors of two devices, and a GPU refuses it."""


class SecondDevice:
    """Makes torch's device `cuda` one that computes on the CPU, for the thread that enters it.

    Attributes:
        reads: for each value that the host read of a tensor there, the operation and the line of code that read it.
        current: the one that is entered.
        waits: the same for what the host copied to there and waited for, as GPUs do unless `non_blocking` is set.
    """

    current: ClassVar["SecondDevice | None"] = None

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.waits: list[str] = []
        self._queue = _Queue()

    def __enter__(self) -> "SecondDevice":
        self._blocks, names = ExitStack(), _Names()
        for module, name, replacement in (
            (torch._C, "_group_tensors_by_device_and_dtype", _named_groups()),
            (BackwardCFunction, "apply", names.reading(BackwardCFunction.apply)),
            (torch, "Generator", _Generator),
            (torch.UntypedStorage, "data_ptr", _storage_address),
            (torch.accelerator, "synchronize", self._queue.synchronize),
            (torch.cuda, "synchronize", self._queue.synchronize),
            (torch.cuda, "get_device_name", lambda device=None: "second device"),
            (torch.cuda, "current_stream", lambda device=None: self._queue),
            (torch.cuda, "Event", lambda: self._queue),
            (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
            (torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state)),
        ):
            self._blocks.enter_context(mock.patch.object(module, name, replacement))
        self._blocks.enter_context(_Operations(self.reads, self.waits, self._queue))
        self._blocks.enter_context(names)
        SecondDevice.current = self
        return self

    def __exit__(self, *raised: Any) -> None:
        SecondDevice.current = None
        self._blocks.close()

    @classmethod
    def now(cls) -> torch.device:
        """Return the device where one is entered, the CPU where none is."""
        return torch.device("cpu") if cls.current is None else DEVICE


class _Queue:
    """Copies that the host did not wait for, whose targets hold nonsense until it does; a stream, and an event."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, host: torch.Tensor) -> None:
        """Take back what was copied until somebody waits."""
        self._copies.append((host, host.clone()))
        host.fill_(torch.nan) if host.is_floating_point() else host.bitwise_not_()

    def record(self, stream: Any = None) -> None:
        """Do nothing: there is one event, after all that was queued."""

    def synchronize(self, device: Any = None) -> None:
        """Finish the copies."""
        copies, self._copies = self._copies, []
        for host, value in copies:
            host.copy_(value)


_TorchGenerator = torch.Generator


class _Generator(_TorchGenerator):
    """A generator of the CPU that may say it is of the second device."""

    there: WeakValueDictionary[int, "_Generator"] = WeakValueDictionary()

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made = super().__new__(cls, "cpu")
        made.named = torch.device(device)
        if made.named.type == DEVICE.type:
            cls.there[made._cdata] = made  # operations are given another object of Python with the same inside
        return made

    @property
    def device(self) -> torch.device:
        """Return the device that it was made for."""
        return self.named


def _storage_address(storage: torch.UntypedStorage) -> int:
    return torch._C.StorageBase.data_ptr(getattr(storage, "memory", storage))


def _named_groups() -> Callable[..., dict]:
    """Return torch's function that sorts tensors by device, with this one's name in what it returns."""
    group = torch._C._group_tensors_by_device_and_dtype

    def named(*args: Any) -> dict:
        found = group(*args)
        return {(DEVICE if device == _META else device, dtype): value for (device, dtype), value in found.items()}

    return named


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with what it holds in lists, tuples and dicts changed."""
    if type(value) in (list, tuple):
        return type(value)([_changed(each, change) for each in value])
    if type(value) is dict:
        return {name: _changed(each, change) for name, each in value.items()}
    return change(value)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among values, and in lists among them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


# Names: what Python is told, and tells.


_GETTERS = {
    torch.Tensor.device.__get__: lambda tensor: DEVICE,
    torch.Tensor.is_cuda.__get__: lambda tensor: True,
    torch.Tensor.is_meta.__get__: lambda tensor: False,
    torch.Tensor.get_device: lambda tensor: DEVICE.index,
    torch.Tensor.data_ptr: lambda tensor: _mirror(tensor).data_ptr(),
}
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


class _Names(TorchFunctionMode):
    """Calls the device `cuda` where Python reads it, and `meta` where Python passes it to torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GETTERS:
            return _GETTERS[func](args[0]) if _is_there(args[0]) else func(*args)
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args, kwargs = _changed((args, kwargs or {}), _inner_name)
        if func in _FROM_DATA and kwargs.get("device") == _META and not _is_there(args[0]):
            return func(*args, **{**kwargs, "device": None}).to(_META)
        if func is torch.Tensor.cuda:
            return args[0].to(_META)
        if func in _HOOKS:
            return func(args[0], self.reading(args[1]))
        if kwargs.get("pin_memory"):
            pinned = func(*args, **{**kwargs, "pin_memory": False})
            pinned.untyped_storage().is_pinned_there = True
            return pinned
        return func(*args, **kwargs)

    def reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that reads names as others do when torch's engine calls it, which leaves modes out."""

        def named(*args: Any) -> Any:
            with self:
                return function(*args)

        return named


def _inner_name(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _META if value.type == DEVICE.type else value
    return _META if isinstance(value, str) and value.split(":")[0] == DEVICE.type else value


def _is_there(value: Any) -> bool:
    """Whether a value is a tensor of the device; asked where Python's names do not act."""
    with torch._C.DisableTorchFunction():
        return isinstance(value, torch.Tensor) and value.is_meta


# Operations: where they are done.


class _Operations(TorchDispatchMode):
    """Does operations of the device on the CPU, or refuses them."""

    def __init__(self, reads: list[str], waits: list[str], queue: _Queue) -> None:
        super().__init__()
        self._reads, self._waits, self._queue = reads, waits, queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((*args, *kwargs.values()))
        wanted = kwargs.get("device")
        if wanted != _META and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        _check_devices(func, args, kwargs, tensors)
        for happens, noted in ((_is_read, self._reads), (_is_waited_for, self._waits)):
            if happens(func, args, kwargs):
                noted.append(f"{func} in {_place()}")
                self._queue.synchronize()
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)  # of a shape, not of values
        mirrors = {id(tensor): _mirror(tensor) for tensor in tensors if tensor.is_meta}
        there_args, there_kwargs = _changed((args, kwargs), lambda value: mirrors.get(id(value), value))
        if wanted == _META:
            there_kwargs = {**there_kwargs, "device": torch.device("cpu")}
        result = func(*there_args, **there_kwargs)
        if _goes_on(func, args, kwargs):
            self._queue.add(result)
        if wanted is not None and wanted != _META:
            return result
        lift = _Lift(tensors, mirrors)
        if _is_of_lists(func) and isinstance(result, list | tuple):
            groups = _at_each_place(args)
            return [lift(each) if group[0].is_meta else each for each, group in zip(result, groups, strict=True)]
        return _changed(result, lambda value: lift(value) if isinstance(value, torch.Tensor) else value)


def _is_read(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host has to wait for a value."""
    packet = func.overloadpacket
    if packet in _COPIES:
        is_copied = any(source.is_meta and not to_there for source, to_there in _copied(func, args, kwargs))
        return is_copied and not _goes_on(func, args, kwargs)
    if packet in _INDEXED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return packet in _READS or any(tag in func.tags for tag in _SHAPED_BY_VALUES)


def _goes_on(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is a copy to the host that the host does not wait for: one to pinned memory."""
    if func.overloadpacket not in (_aten._to_copy, _aten.copy_) or not _is_unblocking(args, kwargs):
        return False
    ((source, to_there),) = _copied(func, args, kwargs)
    # A new tensor is pinned by torch itself.
    is_pinned = func.overloadpacket is _aten._to_copy or hasattr(args[0].untyped_storage(), "is_pinned_there")
    return source.is_meta and not to_there and is_pinned


def _is_unblocking(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking") or True in args[2:3])


def _is_waited_for(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host has to wait until something has been copied to the device."""
    if func.overloadpacket in _INDEXED:
        return any(index is not None and not index.is_meta for index in args[1])
    if func.overloadpacket not in _COPIES or _is_unblocking(args, kwargs):
        return False
    return any(to_there and not source.is_meta for source, to_there in _copied(func, args, kwargs))


def _copied(func: Any, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, bool]]:
    """Return what an operation copies, with whether it is copied to the device."""
    if func.overloadpacket is _aten._to_copy:
        wanted = kwargs.get("device")
        return [(args[0], args[0].is_meta if wanted is None else wanted == _META)]
    targets, sources = args[:2] if _is_of_lists(func) else ([args[0]], [args[1]])
    return [(source, target.is_meta) for target, source in zip(targets, sources, strict=True)]


def _mirror(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of the CPU that has a tensor's memory."""
    memory = getattr(tensor.untyped_storage(), "memory", None)
    if memory is None:
        raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} was made past the second device, and has no data")
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Lift:
    """Takes results of the CPU back to the device.

    Args:
        tensors: what the operation was given.
        mirrors: what was given to the CPU in the place of those of the device, by their `id`.
    """

    def __init__(self, tensors: list[torch.Tensor], mirrors: dict[int, torch.Tensor]) -> None:
        self._given = {id(mirrors.get(id(tensor), tensor)): tensor for tensor in tensors}
        there = [tensor for tensor in tensors if tensor.is_meta]
        self._storages = {mirrors[id(t)].untyped_storage()._cdata: t.untyped_storage() for t in there}

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the device that has a result's memory, or the tensor that was changed."""
        if id(result) in self._given:
            return self._given[id(result)]
        memory = result.untyped_storage()
        storage = self._storages.get(memory._cdata)
        if storage is None:
            storage = torch.UntypedStorage(memory.nbytes(), device="meta")
            storage.memory = memory
            self._storages[memory._cdata] = storage
        empty = torch.empty(0, dtype=result.dtype, device="meta")
        return empty.set_(storage, result.storage_offset(), result.shape, result.stride())


def _place() -> str:
    """Return the line of code that is neither torch's nor of this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, __file__, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


# Devices that may meet.


def _check_devices(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
    """Raise if a GPU refuses the operation because of where its tensors are."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, _TorchGenerator) and value._cdata not in _Generator.there:
            raise MixedDevices(f"{func} expected a 'cuda' device type for generator but found 'cpu'")
    if len({tensor.is_meta for tensor in tensors}) < 2 or func.overloadpacket in _COPIES:
        return
    if _is_of_lists(func):
        groups = _at_each_place(args)
    elif func.overloadpacket in _INDEXED and args[0].is_meta:
        groups = [[args[0], *args[2:3]]]  # its places may be listed on the CPU
    else:
        groups = [tensors]
    takes_scalars = (
        torch.Tag.pointwise in func.tags or _is_of_lists(func) or func.overloadpacket in (*_INDEXED, _aten.fill_)
    )
    for group in groups:
        mixed = len({tensor.is_meta for tensor in group}) > 1
        scalars = all(tensor.is_meta or tensor.ndim == 0 for tensor in group)
        changes_scalar = func._schema.is_mutable and not group[0].is_meta
        if mixed and not (takes_scalars and scalars and not changes_scalar):
            shapes = ", ".join(f"{'cuda:0' if t.is_meta else 'cpu'} {tuple(t.shape)}" for t in group)
            raise MixedDevices(f"{func} expected all tensors to be on the same device, and found: {shapes}")


@cache
def _is_of_lists(func: Any) -> bool:
    return func._schema.name.startswith("aten::_foreach_")


def _at_each_place(args: Iterable[Any]) -> list[list[torch.Tensor]]:
    """Return the tensors that meet in an operation on lists; one that is not a list meets all; packed numbers, none."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor)]
    alone = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.ndim == 0]
    return [[*tensors, *alone] for tensors in zip(*lists, strict=True)]
