"""Cut a model into stages of layers: what each holds, and what is passed from one to the next."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from tr_dist.base import some_of
from tr_log.events_file import sizes_of

_HIDDEN = "inputs_embeds"


class Elsewhere(nn.Module):
    """Where another stage has a module: it returns its first input, and has the other's plain attributes.

    Args:
        module: what it is in the place of.
        kept: what it holds all the same, since fully_shard finds the units of a model in its first forward.
    """

    def __init__(self, module: nn.Module, kept: nn.Module | None = None) -> None:
        super().__init__()
        self.kept = kept
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, first: Any = None, *others: Any, **named: Any) -> Any:
        """Return the first input."""
        return first if first is not None or not named else next(iter(named.values()))


class Layers(nn.ModuleList):
    """Layers of which those of one stage compute, and the others return what they get."""

    active: frozenset[int] = frozenset()

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        layer = super().__getitem__(number)
        return layer if number in self.active else Elsewhere(layer)


@dataclass
class Cut:
    """How a model may be cut.

    Attributes:
        name: of its list of layers.
        layers: that list.
        before: names of the modules that make the first layer's input.
        after: names of the modules that take the last layer's output.
        first: inputs that only the first stage gets: `inputs_embeds` is in their place on the others.
        at_end: inputs that only the last stage gets, as labels; every stage gets all others.
    """

    name: str
    layers: nn.ModuleList
    before: list[str]
    after: list[str]
    first: frozenset[str]
    at_end: frozenset[str]


def cut_of(model: nn.Module) -> Cut:
    """Return how a model may be cut: by the plan of a model of transformers, or by its own attribute `pp_plan`.

    A plan has an entry for each module that is called in the forward, in their order, with the names of its inputs and
    outputs: `"words": (["input_ids"], ["inputs_embeds"]), "layers": (["inputs_embeds"], ["hidden"])`, and then `"head":
    (["hidden", "labels"], ["logits"])`. Inputs that it names after the layers alone are those of the last stage.

    Raises:
        ValueError: there is no plan, or it cannot be followed.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    of_transformers = getattr(config, "base_model_pp_plan", None)
    prefix = getattr(model, "base_model_prefix", "") if of_transformers else ""
    children = dict(model.named_children())
    # The body of a model is a child of it, and of a bare body the model itself.
    if prefix and prefix not in children and not children.keys() & set(of_transformers or ()):
        raise ValueError(f"pp_size cuts a model of transformers as it is, and {kind} wraps one, as for an adapter")
    base: nn.Module = children.get(prefix, model)
    plan: Mapping[str, Any] | None = of_transformers or getattr(model, "pp_plan", None)
    if not plan:
        raise ValueError(
            f"pp_size cuts a model by a plan, and {kind} has none; give it an attribute such as pp_plan = "
            "{'words': (['input_ids'], ['inputs_embeds']), 'layers': (['inputs_embeds'], ['hidden']), "
            "'head': (['hidden', 'labels'], ['logits'])}, and a forward that takes inputs_embeds in place of input_ids"
        )
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            raise ValueError(
                f"pp_size: {name}=True asks for what all layers give, and a stage has some; set it to False"
            )
    parameters = inspect.signature(base.forward).parameters
    if _HIDDEN not in parameters:
        raise ValueError(f"pp_size needs a forward that takes {_HIDDEN}, and that of {type(base).__name__} does not")
    lists = [name for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1:
        raise ValueError(f"pp_size cuts one list of layers, and the plan of {kind} names {lists or 'none'}")
    names, own = list(plan), f"{prefix}." if base is not model else ""
    place = names.index(lists[0])
    heads = [name for name, _ in model.named_children() if own and name != prefix]
    # A stage begins its forward with the names that are no module's output.
    made = {_HIDDEN, "hidden_states", *(name for _, outputs in plan.values() for name in outputs)}
    first = {name for entry in names[:place] for name in plan[entry][0]} - made
    before = {name for entry in names[: place + 1] for name in plan[entry][0]}
    at_end = {name for entry in names[place + 1 :] for name in plan[entry][0]} - before
    if of_transformers:  # whose plan is that of its body
        at_end = inspect.signature(model.forward).parameters.keys() - parameters.keys()
    return Cut(
        name=own + lists[0],
        layers=getattr(base, lists[0]),
        before=[own + name for name in names[:place]],
        after=[*(own + name for name in names[place + 1 :]), *heads],
        first=frozenset(first),
        at_end=frozenset(at_end - made),
    )


def bounds_of(cut: Cut, split: Sequence[str] | None, size: int, each: int) -> list[range]:
    """Return the numbers of the layers of each stage.

    Args:
        cut: of the model.
        split: the first layer of each stage but the first, by name; None divides them evenly.
        size: number of processes in a row.
        each: stages that each of them has.

    Raises:
        ValueError: a name is not a layer's, they are not in order, or there are not enough layers.
    """
    number, stages = len(cut.layers), size * each
    if split is None:
        if number < stages:
            raise ValueError(
                f"pp_size={size} makes {stages} stages of {number} layers; at most {number // each} processes have some"
            )
        starts = [round(stage * number / stages) for stage in range(stages)]
    else:
        full = {f"{cut.name}.{layer}": layer for layer in range(number)}
        known = full | {f"{cut.name.rpartition('.')[2]}.{layer}": layer for layer in range(number)}
        if unknown := [name for name in split if name not in known]:
            raise ValueError(f"pp_split names {some_of(unknown)}; a stage begins with one of {some_of(list(full))}")
        starts = [0, *(known[name] for name in split)]
        if starts != sorted(set(starts)):
            raise ValueError(f"pp_split={list(split)} must name other layers than the first, in their order")
        if len(starts) != stages:
            raise ValueError(
                f"pp_split begins {len(split)} stages after the first, and pp_size={size} with {each} on each process "
                f"needs {stages - 1}"
            )
    return [range(start, end) for start, end in zip(starts, [*starts[1:], number], strict=True)]


class Stages:
    """The stages of one process, cut out of a model in place: the model keeps its names, and loses the others' modules.

    Args:
        model: whole, on this process too.
        split: see `bounds_of`.
        place: number of this process in its row.
        size: number of processes in a row.
        each: stages on each.

    Attributes:
        own: numbers of the stages of this process.
        last: number of the last stage of all.
        names: names of the whole model's parameters, in its order.
        entries: names in the whole model's state dict, in its order.
        tied: names of the parameters that the first and the last stage share.

    Raises:
        ValueError: the model cannot be cut; see `cut_of`, `bounds_of`.
    """

    def __init__(self, model: nn.Module, split: Sequence[str] | None, place: int, size: int, each: int) -> None:
        self.model, self.cut = model, cut_of(model)
        self._bounds = bounds_of(self.cut, split, size, each)
        self._takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self.own, self.last = range(place, size * each, size), size * each - 1
        self.names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self.entries = list(model.state_dict())
        cast("Any", model).sizes_of_whole = sizes_of(model)  # for logs and reports
        self._hidden, self._ends_early, self._is_within = None, False, True
        self.tied = self._check_and_find_tied()
        owner, _, attribute = self.cut.name.rpartition(".")
        self.layers = Layers(self.cut.layers)
        setattr(model.get_submodule(owner), attribute, self.layers)
        parameter = next(model.parameters())
        entered = torch.linspace(-1, 1, 4 * self._width()).view(1, 4, -1)  # none that are drawn: it changes no order
        self.check({}, entered.to(parameter.device, parameter.dtype))
        kept = {number for stage in self.own for number in self._bounds[stage]}
        for number, layer in enumerate(self.cut.layers):
            if number not in kept:
                self.layers[number] = Elsewhere(layer)
        is_first, is_last = 0 in self.own, self.last in self.own
        for name in self.cut.before:
            if not (is_first or (is_last and any(tied.startswith(f"{name}.") for tied in self.tied))):
                model.set_submodule(name, Elsewhere(model.get_submodule(name)))
        self._after = {name: model.get_submodule(name) for name in self.cut.after}
        if not is_last:
            for name, module in self._after.items():
                model.set_submodule(name, Elsewhere(module))
        for stage in self.own:
            super(Layers, self.layers).__getitem__(self._bounds[stage][-1]).register_forward_hook(self._keep_hidden)
        self._is_within = False
        self._refuse_generation()
        model.register_forward_pre_hook(self._check_begun)
        model.register_forward_hook(self._give_hidden)

    def run(self, stage: int, inputs: Mapping[str, Any], hidden: torch.Tensor | None) -> Any:
        """Compute a stage: its hidden states, or of the last stage the model's outputs.

        Args:
            stage: its number.
            inputs: of the model, for the whole micro-batch.
            hidden: what the stage before gave; None for the first.
        """
        given = self._given(inputs, hidden, to_end=stage == self.last)
        with self._active(stage):
            return self.model(**given)

    def _given(self, inputs: Mapping[str, Any], hidden: torch.Tensor | None, *, to_end: bool) -> dict[str, Any]:
        left_out = (frozenset() if to_end else self.cut.at_end) | (
            self.cut.first if hidden is not None else frozenset()
        )
        given = {name: value for name, value in inputs.items() if name not in left_out}
        if hidden is not None:
            given[_HIDDEN] = hidden
        if self._takes_cache:
            given["use_cache"] = False  # a stage has some of the layers alone
        return given

    @contextmanager
    def _active(self, stage: int) -> Iterator[None]:
        self.layers.active, self._is_within = frozenset(self._bounds[stage]), True
        self._ends_early = stage != self.last
        held = self._after if self._ends_early and self.last in self.own else {}
        try:
            with _in_place(self.model, {name: Elsewhere(module, module) for name, module in held.items()}):
                yield
        finally:
            self._hidden, self._ends_early, self.layers.active = None, False, frozenset()
            self._is_within = False

    def _check_begun(self, model: nn.Module, inputs: Any) -> None:
        if not self._is_within:
            raise RuntimeError(
                f"this process holds some layers of {type(model).__name__} alone (pp_size); call model_wrapped, on "
                "every process, which passes hidden states on"
            )

    def _keep_hidden(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if self._ends_early:  # not where a layer is computed again for its gradients
            self._hidden = output[0] if isinstance(output, tuple) else output

    def _give_hidden(self, model: nn.Module, inputs: Any, output: Any) -> Any:
        """Replace the model's outputs by the hidden states, where others go on with them."""
        return self._hidden if self._ends_early else None

    def _refuse_generation(self) -> None:
        def generate(*inputs: Any, **options: Any) -> Any:
            raise RuntimeError(
                "pp_size: stages do not generate, since each token would pass all of them by itself; save the model, "
                "and generate with one process or with tp_size"
            )

        if callable(getattr(self.model, "generate", None)):
            cast("Any", self.model).generate = generate

    def _check_and_find_tied(self) -> list[str]:
        """Return the names of parameters that modules before and after the layers share.

        Raises:
            ValueError: a parameter belongs to no stage, or is shared otherwise.
        """
        places = (("before", self.cut.before), ("layers", [self.cut.name]), ("after", self.cut.after))
        held: dict[int, set[str]] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            where = [place for place, modules in places if any(name.startswith(f"{each}.") for each in modules)]
            if not where:
                raise ValueError(f"pp_size: {name} belongs to none of the modules of the plan, so to no stage")
            held.setdefault(id(parameter), set()).add(where[0])
            names.setdefault(id(parameter), []).append(name)
        if wrong := [names[key][0] for key, where in held.items() if len(where) > 1 and "layers" in where]:
            raise ValueError(f"pp_size: {some_of(wrong)} are shared by layers and what is around them")
        return [name for key, where in held.items() if where == {"before", "after"} for name in names[key]]

    @torch.no_grad()
    def check(self, inputs: Mapping[str, Any], entered: torch.Tensor) -> None:
        """Check that hidden states leave as they entered where no layer computes: nothing else of the forward does.

        Args:
            inputs: of the model.
            entered: hidden states, of the shape that a layer gets with them.

        Raises:
            ValueError: they do not, as where embeddings are scaled or masks applied outside of the plan's modules.
        """
        model, left, was_within = self.model, list[Any](), self._is_within
        probe = Elsewhere(nn.Identity(), nn.ModuleList(model.get_submodule(name) for name in self.cut.after))
        probe.register_forward_hook(lambda module, inputs, output: left.append(output))
        self._is_within = True
        said = ""
        try:
            with _in_place(model, dict.fromkeys(self.cut.after, probe)):
                model(**self._given(inputs, entered, to_end=False))
        except Exception as error:  # the user's own forward
            said = f" ({type(error).__name__}: {error})"
        finally:
            self._is_within = was_within
        is_same = bool(left) and isinstance(left[0], torch.Tensor) and torch.equal(left[0], entered)
        if said or not is_same:
            raise ValueError(
                f"pp_size: {type(model).__name__} does not hand {_HIDDEN} unchanged from layer to layer{said}, with "
                f"the inputs {', '.join(inputs) or 'none'}; its forward must change them by modules of the plan alone"
            )

    def _width(self) -> int:
        for name in self.cut.before:
            module = self.model.get_submodule(name)
            if isinstance(module, nn.Embedding):
                return module.embedding_dim
        raise ValueError(f"pp_size: none of {self.cut.before} is an Embedding, whose size hidden states would have")


@contextmanager
def _in_place(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put modules in the place of those of their names in a block."""
    before = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            model.set_submodule(name, module)
        yield
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)
