"""Run a script on the Trainer of transformers or on this one, and write down what its Trainers log.

`trainer drop-in --compare` starts this twice. The script is not edited: a callback is put into each Trainer that it
builds, and the `output_dir` of its arguments becomes a folder below that of the run.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from tr_all.drop_in import drop_in
from tr_all.same_draws import SameDraws, replaced

# What is asked of the arguments of a run, to find the cause of a difference.
ARGUMENTS = (
    "auto_find_batch_size",
    "bf16",
    "fp16",
    "gradient_accumulation_steps",
    "group_by_length",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "predict_with_generate",
    "train_sampling_strategy",
)
WATCHED_STEPS = 3  # a model that draws random numbers draws them in its first steps


class Recorder:
    """Write what one Trainer does to a file, a line of JSON for each event: a callback.

    Args:
        path: the file, to which all Trainers of the run append.
        number: which Trainer of the script this is, in the order in which they are built.
        collator: returns the Trainer's collator.
        same: seeds forward passes, where both runs draw the same random numbers.
    """

    def __init__(self, path: Path, number: int, collator: Callable[[], Any], same: SameDraws | None = None) -> None:
        self._path = path
        self._same = same
        self._number = number
        self._collator = collator
        self._random_state: Any = None
        self._model_draws = same is not None  # then it is not looked at
        self._generation: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write how long the run is, and what may explain a difference."""
        model = kwargs.get("model")
        if self._same is not None:
            self._same.seed_passes(model)
        self._generation = _generation_settings(model)
        facts = {name: _plain(getattr(args, name, None)) for name in ARGUMENTS}
        facts["optim"] = str(_plain(getattr(args, "optim", "")))
        facts["optimizer"] = _described_optimizer(kwargs.get("optimizer"))
        facts["seed_of_torch_is_the_arguments"] = _torch().initial_seed() == args.seed
        facts["collator"] = _described_collator(self._collator())
        facts["max_steps"] = state.max_steps
        facts["weights"] = digest_of(model)
        self._write("begin", state, facts)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember the random state, to see whether the forward or backward pass draws."""
        watched = not self._model_draws and state.global_step < WATCHED_STEPS
        self._random_state = _random_states_of_torch() if watched else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See whether the step drew random numbers, as dropout does."""
        if self._random_state is not None and self._random_state != _random_states_of_torch():
            self._model_draws = True
            self._write("fact", state, {"model_draws": True})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write an entry of the log."""
        self._write("log", state, {key: _plain(value) for key, value in dict(logs or {}).items()})

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Write the metrics of a prediction, which are not logged."""
        self._write("log", state, {key: _plain(value) for key, value in dict(metrics or {}).items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what identifies the weights, for scripts that save none."""
        if self._generation != _generation_settings(kwargs.get("model")):
            self._write("fact", state, {"generation_settings_written": True})
        self._write("end", state, {"weights": digest_of(kwargs.get("model"))})

    def _write(self, event: str, state: Any, values: dict[str, Any]) -> None:
        line = {"event": event, "trainer": self._number, "step": state.global_step, "values": values}
        append(self._path, line)


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line of JSON to a file that other processes write to."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def digest_of(model: Any) -> str | None:
    """Return what differs if a bit of a model's weights does; None where they are not whole in this process."""
    if model is None or not hasattr(model, "state_dict"):
        return None
    digest = hashlib.blake2b(digest_size=16)
    torch = _torch()
    for name, value in sorted(model.state_dict().items()):
        if type(value) is not torch.Tensor or value.device.type == "meta":
            continue
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def recorded(path: Path, folder: Path, same: SameDraws | None = None) -> Iterator[None]:
    """Put a recorder into each Trainer that is built in the block, and its output below a folder.

    Args:
        path: the file for what is recorded.
        folder: that of the run; an `output_dir` that is not in it becomes a folder in it.
        same: seeds forward passes, where both runs draw the same random numbers.
    """
    package = import_module("transformers")
    numbers = count()
    kind = type("Recorder", (Recorder, package.TrainerCallback), {})

    def built(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if same is not None:
                same.seed_passes(self.model)
            self.add_callback(kind(path, next(numbers), lambda: getattr(self, "data_collator", None), same))

        return init

    def completed(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
            given = Path(str(self.output_dir or "trainer_output"))
            if not given.absolute().is_relative_to(folder):
                self.output_dir = str(folder / given.name)
            original(self, *args, **kwargs)

        return post_init

    places = [(package.Trainer, "__init__", built), (package.TrainingArguments, "__post_init__", completed)]
    with replaced([(kind_, name, wrap(getattr(kind_, name))) for kind_, name, wrap in places]):
        yield


@contextmanager
def watched_loading(path: Path) -> Iterator[None]:
    """Write to a file that random numbers were drawn while a batch was read: in a data set or a collator."""
    fetch = import_module("torch.utils.data._utils.fetch")
    seen: list[bool] = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(self: Any, *args: Any) -> Any:
            if seen:
                return original(self, *args)
            before = _all_random_states()
            batch = original(self, *args)
            if before != _all_random_states():
                seen.append(True)
                append(path, {"event": "fact", "trainer": 0, "step": 0, "values": {"loading_draws": True}})
            return batch

        return read

    kinds = [fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher]
    with replaced([(kind, "fetch", watched(kind.fetch)) for kind in kinds]):
        yield


def _torch() -> Any:
    return import_module("torch")


def _random_states_of_torch() -> tuple[bytes, ...]:
    torch = _torch()
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return tuple(state.numpy().tobytes() for state in states)


def _all_random_states() -> tuple[Any, ...]:
    name, keys, *rest = import_module("numpy").random.get_state()
    return _random_states_of_torch(), random.getstate(), (name, keys.tobytes(), *rest)


def _generation_settings(model: Any) -> Any:
    settings: Any = getattr(model, "generation_config", None)
    return settings.to_dict() if hasattr(settings, "to_dict") else None


def _described_optimizer(optimizer: Any) -> str:
    inner = getattr(optimizer, "optimizer", optimizer)
    groups = getattr(inner, "param_groups", None) or [{}]
    options = [name for name in ("fused", "foreach") if groups[0].get(name)]
    return " ".join([type(inner).__name__, *options])


def _described_collator(collator: Any) -> dict[str, Any]:
    tokenizer = getattr(collator, "tokenizer", None)
    end = getattr(tokenizer, "eos_token_id", None)
    return {
        "name": type(collator).__name__,
        "mlm": _plain(getattr(collator, "mlm", None)),
        "pads_with_end_of_text": end is not None and end == getattr(tokenizer, "pad_token_id", None),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        value = value.value
    if callable(getattr(value, "tolist", None)):  # numbers of numpy and torch
        value = value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script and record it: `python -m tr_all.recording --trainer ours --folder FOLDER SCRIPT args...`."""
    parser = argparse.ArgumentParser(prog="python -m tr_all.recording", description=main.__doc__)
    parser.add_argument("--trainer", choices=("transformers", "ours"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--same-draws", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    path = given.folder / "recorded.jsonl"
    sys.argv = [given.script, *given.arguments]
    sys.path[0] = str(Path(given.script).parent.resolve())
    same = SameDraws() if given.same_draws else None
    with ExitStack() as stack:
        if given.trainer == "ours":
            stack.enter_context(drop_in())
        elif same is None:
            stack.enter_context(watched_loading(path))
        if same is not None:
            stack.enter_context(same.loading())
        stack.enter_context(recorded(path, given.folder.resolve(), same))
        runpy.run_path(given.script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
