"""Each optimizer that this package offers by name, in each of its ways: the rows of `test_contract.py`.

An optimizer that is installed has a row here by itself. `WAYS` has further ones, with options that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import distribution
from types import SimpleNamespace

import torch
from torch import nn

from tr_optim import parameter_groups

STEPS = 8
ENTRIES = {
    entry.name: entry
    for entry in distribution("tr-optim").entry_points
    if entry.group == "tr.optimizers" and ".adapters." not in entry.value
}
LAZY = "refresh=lazy, refresh_window=1, update_proj_gap=2, basis_dtype=int8"
STORED = "accumulate=store"
ROUNDED = "stochastic_rounding=true"  # in bfloat16 alone
# What Q-GaLore has beside int8 weights.
Q_GALORE = f"basis_dtype=int4, refresh=lazy, refresh_window=1, update_proj_gap=2, {ROUNDED}"
# By name: `optim_args`, and the norm to clip to, if not None.
WAYS = {
    "adafactor": [("beta1=0.9, scale_parameter=true", None), (ROUNDED, None)],
    "adamw_8bit": [("", 0.1)],
    "lomo": [
        ("", 0.05),
        ("nonfinite=skip_step", 0.05),
        ("nonfinite=skip_step", None),
        ("nonfinite=skip_tensor", None),
        (f"{STORED}, clip_grad_value=1e-3", None),
        (ROUNDED, None),
        (ROUNDED, 0.05),
    ],
    "adalomo": [
        ("", 0.05),
        ("nonfinite=skip_step", None),
        ("nonfinite=skip_tensor", None),
        (STORED, None),
        (ROUNDED, None),
    ],
    "galore_adamw": [("rotate_moments=false, proj_type=full", 0.1), (LAZY, None), (ROUNDED, None)],
    "galore_adamw_layerwise": [
        (ROUNDED, 0.1),
        ("method=svd", 0.1),
        ("refresh_from=first", None),
        ("mode=immediate", None),
        ("proj_type=full, basis_dtype=bfloat16", None),
        ("mode=immediate, proj_type=full, stagger=false", None),
        ("mode=immediate, proj_type=reverse_std, method=svd", None),
        (f"mode=immediate, {LAZY}", None),
        (f"mode=immediate, {ROUNDED}", None),
    ],
    "galore_adamw_8bit": [("rotate_moments=false", None)],
    "galore_adamw_8bit_layerwise": [("mode=immediate, refresh_from=first", None), (LAZY, 0.1), (Q_GALORE, None)],
    "galore_adafactor": [("beta1=0.9", 0.1), (ROUNDED, None)],
    "galore_adafactor_layerwise": [("beta1=0.9", None), ("mode=immediate, beta1=0.9", None)],
    "apollo_adamw": [(ROUNDED, None), ("proj=svd", 0.1), ("proj_type=reverse_std", None)],
    "apollo_adamw_layerwise": [("proj=svd", 0.1), ("proj_type=reverse_std", None)],
    "apollo_mini_layerwise": [("", 0.1)],
    "fira_adamw": [("proj_type=reverse_std, norm_growth=none", 0.1)],
    "fira_adamw_layerwise": [(ROUNDED, None), ("proj_type=reverse_std", 0.1), ("norm_growth=none", None)],
}


class Network(nn.Module):
    """Has matrices, vectors, a stack, weights that no batch or not every one uses, and an empty parameter."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 12, sparse=sparse)
        self.first, self.norm = nn.Linear(12, 24), nn.LayerNorm(24)
        self.experts = nn.Parameter(torch.randn(2, 24, 10) / 5)
        self.last = nn.Linear(20, 14)
        self.unused = nn.Linear(4, 6)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.sometimes, self.uses_it = nn.Parameter(torch.ones(14)), True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(self.embedding(tokens))))
        hidden = torch.einsum("ni,eij->nej", hidden, self.experts).flatten(1)
        return self.last(hidden) + self.empty.sum() + (self.sometimes if self.uses_it else 0.0)


@dataclass(frozen=True)
class Row:
    """One optimizer in one of its ways.

    Attributes:
        name: of the optimizer.
        optim_args: its further options.
        max_norm: the norm that gradients are clipped to; None for none.
        dtype: of the weights.
    """

    name: str
    optim_args: str = ""
    max_norm: float | None = None
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        clipped = "" if self.max_norm is None else f"clipped to {self.max_norm}"
        return ", ".join(filter(None, (self.name, self.optim_args, clipped, str(self.dtype).removeprefix("torch."))))

    @property
    def arguments(self) -> SimpleNamespace:
        """The training arguments."""
        given = [] if self.name.startswith(("lomo", "ada")) else ["update_proj_gap=3", "scale=1.0"]
        given += ["rank=3"] if given and "mini" not in self.name else []
        given += ["min_8bit_size=0"] if "8bit" in self.name else []
        given += ["reduction=whole"] if "mode=immediate" in self.optim_args else []
        given = [option for option in given if f"{option.partition('=')[0]}=" not in self.optim_args]
        return SimpleNamespace(
            optim=self.name,
            optim_args=", ".join([*given, self.optim_args]),
            optim_target_modules="all-linear",
            learning_rate=1e-2,
            adam_beta1=0.9,
            adam_beta2=0.99,
            adam_epsilon=1e-8,
            max_grad_norm=self.max_norm or 0.0,
            gradient_accumulation_steps=1,
            on_nonfinite="apply",
            fp16=False,
            seed=0,
        )

    @property
    def accumulates(self) -> bool:
        """Whether several micro-batches may make a step."""
        return self.name not in ("lomo", "adalomo") or STORED in self.optim_args

    def optimizer(self, model: nn.Module, groups: list[dict] | None = None, **changes: object) -> torch.optim.Optimizer:
        """Build the optimizer as a Trainer does, with a weight decay."""
        factory = ENTRIES[self.name].load()
        args = SimpleNamespace(**{**vars(self.arguments), **changes})
        groups = parameter_groups(model, 0.1) if groups is None else groups
        built = factory(groups, args, model) if getattr(factory, "needs_model", False) else factory(groups, args)
        if hasattr(built, "clip_to"):
            built.clip_to(self.max_norm)
        return built

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a new model and its optimizer."""
        model = Network().to(self.dtype)
        return model, self.optimizer(model)

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, last: int = STEPS, parts: int = 1
    ) -> None:
        """Train for the steps from `first` to before `last`, each of so many micro-batches."""
        for step in range(first, last):
            model.uses_it = step % 3 != 1  # so that parameters have step counts of their own
            for number, (tokens, targets) in enumerate(batch(step, self.dtype, parts), start=1):
                backward(optimizer, (model(tokens) - targets).square().mean() / parts, is_last=number == parts)
            if getattr(optimizer, "fused_in_backward", False):
                if self.max_norm is not None:
                    optimizer.clip_grad_norm(self.max_norm)
            elif self.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.max_norm, foreach=False)
            optimizer.step()
            optimizer.zero_grad()


def backward(optimizer: torch.optim.Optimizer, loss: torch.Tensor, *, is_last: bool = True) -> None:
    """Compute gradients by the optimizer's own backward pass, if it has one."""
    if getattr(optimizer, "fused_in_backward", False):
        optimizer.backward(loss, last=is_last)
    else:
        loss.backward()


def batch(step: int, dtype: torch.dtype, parts: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (8,), generator=generator).chunk(parts)
    targets = torch.randn(8, 14, generator=generator).to(dtype).chunk(parts)
    return list(zip(tokens, targets, strict=True))


def rows(*dtypes: torch.dtype) -> list[Row]:
    """Return the rows of all optimizers; those that round stochastically in bfloat16 only."""
    ways = [(name, way) for name in ENTRIES for way in [("", None), *WAYS.get(name, [])]]
    return [
        Row(name, *way, dtype)
        for dtype in dtypes or (torch.float32,)
        for name, way in ways
        if dtype == torch.bfloat16 or ROUNDED not in way[0]
    ]
