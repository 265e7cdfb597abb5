"""The optimizers that tr-optim offers by name, each in the ways in which it trains: data of several tests.

One that is installed and not named here has a plain setting by itself.
"""

from dataclasses import dataclass, field
from importlib.metadata import distribution

# tr-optim's own; adapters for those of others are not.
INSTALLED = {
    entry.name: entry
    for entry in distribution("tr-optim").entry_points
    if entry.group == "tr.optimizers" and ".adapters." not in entry.value
}

PROJECTS = {"optim_target_modules": "all-linear"}
GAP = 3  # steps between two bases
GALORE = f"rank=2, update_proj_gap={GAP}, scale=1.0"
EIGHT_BITS = f"{GALORE}, min_8bit_size=0"
STORED = {"optim_args": "accumulate=store"}
CLIPPED = {"max_grad_norm": 0.3}


@dataclass(frozen=True, eq=False)
class Setting:
    """One way to train with an optimizer.

    Attributes:
        optim: its name.
        way: what tells it from other ways to train with the same, empty for the plain one.
        options: training arguments.
        accumulates: whether several micro-batches may make a step.
        in_backward: whether it consumes gradients while they are computed, and averages them over ranks itself.
    """

    optim: str
    way: str = ""
    options: dict = field(default_factory=dict)
    accumulates: bool = True
    in_backward: bool = False

    @property
    def keeps_bases(self) -> bool:
        """Whether its state holds what it projects on; APOLLO draws that anew."""
        return "optim_target_modules" in self.options and "apollo" not in self.optim

    @property
    def arguments(self) -> dict:
        return {"optim": self.optim, **self.options}

    def __str__(self) -> str:
        return f"{self.optim} {self.way}".strip()


def _plain(name: str) -> Setting:
    """Return the setting of an optimizer without options of its own."""
    projects = getattr(INSTALLED[name].load(), "takes_target_modules", False)
    return Setting(name, options=PROJECTS if projects else {}, in_backward=name.endswith("_layerwise"))


def _projecting(name: str, optim_args: str = GALORE) -> list[Setting]:
    """Return the ways of an optimizer that projects, and of its layer-wise form."""
    own = {**PROJECTS, "optim_args": optim_args}
    immediate = {**PROJECTS, "optim_args": f"{optim_args}, mode=immediate, reduction=whole", "max_grad_norm": 0}
    return [
        Setting(name, options={**own, **CLIPPED}),
        Setting(f"{name}_layerwise", options={**own, **CLIPPED}, in_backward=True),
        Setting(f"{name}_layerwise", "immediate", immediate, in_backward=True),
    ]


def _with_whole_gradients(name: str, optim_args: str) -> list[Setting]:
    """Return the ways of an optimizer that projects and needs the whole gradient for its update."""
    own = {**PROJECTS, "optim_args": optim_args}
    return [
        Setting(name, options={**own, **CLIPPED}),
        Setting(f"{name}_layerwise", options={**own, "max_grad_norm": 0}, in_backward=True),
        Setting(f"{name}_layerwise", "clipped", {**own, **CLIPPED}, in_backward=True),
    ]


# A gap of 2: with longer ones a run of eight steps ends before a doubled gap does.
LAZY = "rank=2, update_proj_gap=2, scale=1.0, min_8bit_size=0, refresh=lazy, refresh_window=1, basis_dtype=int8"

SETTINGS = [
    Setting("adafactor"),
    Setting("adamw_8bit", options={"optim_args": "min_8bit_size=0"}),
    Setting("lomo", options=CLIPPED, accumulates=False, in_backward=True),
    Setting("lomo", "stored", {**STORED, **CLIPPED}, in_backward=True),
    Setting("adalomo", options={"max_grad_norm": 0}, accumulates=False, in_backward=True),
    Setting("adalomo", "stored", {**STORED, **CLIPPED}, in_backward=True),
    *_projecting("galore_adamw"),
    *_projecting("galore_adamw_8bit", EIGHT_BITS),
    Setting("galore_adamw_8bit_layerwise", "lazy", {**PROJECTS, "optim_args": LAZY, **CLIPPED}, in_backward=True),
    *_projecting("galore_adafactor"),
    *_with_whole_gradients("apollo_adamw", GALORE),
    *_with_whole_gradients("apollo_mini", f"update_proj_gap={GAP}, scale=4.0"),
    *_with_whole_gradients("fira_adamw", GALORE),
]
SETTINGS += [_plain(name) for name in sorted(INSTALLED.keys() - {setting.optim for setting in SETTINGS})]
