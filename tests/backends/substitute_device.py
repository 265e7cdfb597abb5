"""A device called `apple` that computes on the CPU and refuses what a Mac's `mps` device refuses, once a process.

A tensor of it holds a CPU tensor and says that it is elsewhere, so that what is left on the CPU, or is 64 bits wide, or
takes torch.cuda's functions for granted, fails here as on a Mac. What the kernels there compute, and how fast, it
cannot show. Built on torch's backends that are written in Python (torch 2.13, an interface that is not stable).
"""

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "apple"
_WIDE = (torch.float64, torch.complex128)
_FREE = {"copy_", "_to_copy", "index", "_index_put_impl_", "index_put_", "set_"}  # may take tensors of both


class Held:
    """A part of a checkpoint as it is on a real device, whose tensors are not a subclass."""

    def __init__(self, part):
        self.part = part

    def state_dict(self):
        return tree_map(lambda x: x.held if isinstance(x, Away) else x, self.part.state_dict())

    def load_state_dict(self, state_dict):
        self.part.load_state_dict(state_dict)


class Module:
    """What `torch.mps` has, and what torch itself asks of a backend; nothing else of torch.cuda."""

    def __getattr__(self, name):
        if name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "get_rng_state_all"):
            raise AttributeError(f"torch.mps has no {name}")
        return getattr(torch.cpu, name)

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, device):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self):
        return False

    def manual_seed(self, seed):
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self):
        return torch.default_generator.get_state()

    def set_rng_state(self, state):
        torch.default_generator.set_state(state)

    def current_allocated_memory(self):
        return 0

    def empty_cache(self):
        pass

    def synchronize(self, device=None):
        pass


class Away(torch.Tensor):
    """A tensor of the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held, requires_grad=False):
        if held.dtype in _WIDE and (held.numel() > 1 or not Away.has_wide_scalars):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        tensor.held = held
        return tensor

    has_wide_scalars = False  # torch's loss scaler asks for one, but not where the device is called mps

    def __repr__(self):
        return f"Away({self.held!r})"

    def tolist(self):
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return _compute(function, arguments, options or {})


missing = set()  # names of operations that the device is to lack
calls = []  # names of fused optimizer updates


def _compute(function, arguments, options):
    name = function.overloadpacket.__name__
    if name in missing:
        raise NotImplementedError(f"The operator 'aten::{name}' is not currently implemented for the MPS device.")
    if name.startswith("_fused"):
        calls.append(name)
        options = {**options, "found_inf": None, "grad_scale": None}  # as torch did on mps: pull request 186360
    here = []
    homes = {}  # the tensors of the device by what they hold, for operations that return an argument

    def hold(value):
        if isinstance(value, Away):
            homes[id(value.held)] = value
            return value.held
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            here.append(value)
        return value

    device = options.get("device")
    target = torch.device(NAME) if device is None else torch.device(device)
    held, given = tree_map(hold, arguments), tree_map(hold, dict(options))
    if here and homes and name not in _FREE:
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found {NAME} and cpu")
    if device is not None:
        given["device"] = torch.device("cpu")
    result = function(*held, **given)
    if target.type == "cpu" or (name == "copy_" and not isinstance(arguments[0], Away)):
        return arguments[0] if name == "copy_" else result
    return tree_map(lambda x: homes.get(id(x), x if not isinstance(x, torch.Tensor) else Away(x)), result)


_library = torch.library.Library("_", "IMPL")


def register():
    """Make the device; `Module.to` then puts new parameters in the place of old ones."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    _library.fallback(lambda function, *arguments, **options: _compute(function, arguments, options), "PrivateUse1")
    _library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # nothing is cast
    torch.__future__.set_swap_module_params_on_conversion(True)


def substitute_for_mps():
    """Have the strategy for Macs, and what else asks whether a device is `mps`, take this device for it."""
    register()
    import tr_core.choose_strategy as strategies
    import tr_core.metric_means as metric_window
    import tr_core.metric_means as scalars
    import tr_dist.mps as mps

    torch.backends.mps.is_available = lambda: True
    torch.backends.mps.is_macos_or_newer = lambda major, minor: True
    mps._DEVICE = torch.device(NAME)
    strategies.choose_device = lambda use_cpu: torch.device("cpu" if use_cpu else "mps")
    stateful = mps.MPS.state_parts
    mps.MPS.state_parts = lambda self, *given: {name: Held(part) for name, part in stateful(self, *given).items()}
    for module in (metric_window, scalars):
        module.accumulator_dtype = lambda device: torch.float32 if device.type == NAME else torch.float64
    return mps.MPS
