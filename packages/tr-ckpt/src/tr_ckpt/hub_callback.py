"""Push a run's model and checkpoints to the Hub while it trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tr_ckpt import files, manifest, names, snapshot, staging
from tr_ckpt.errors import CheckpointError, PushError
from tr_ckpt.hub_repository import HubRepository
from tr_ckpt.push_queue import PushQueue

logger = logging.getLogger(__name__)

STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")

LAST = "last-checkpoint"

# What stays at home: checkpoints (pushed as the strategy says), private and temporary files.
_AT_HOME = (".", "_")


class HubCallback:
    """Push to a repository of the Hub, in the background, from copies that training cannot change.

    A push that fails is logged as an error at once and again at the end of the run; the run goes on.

    Args:
        repository: where to push.
        output_dir: the run's folder.
        strategy: what a save pushes: `end` nothing; `every_save` the model; `checkpoint` also the checkpoint,
            as `last-checkpoint`; `all_checkpoints` also the checkpoint, under its own name. The end of the
            run pushes the files of `output_dir` in any case.
        always_push: whether a save is pushed also while an earlier push is under way; it then waits its turn.
        prefix: what the names of checkpoints begin with.

    Raises:
        ValueError: there is no such strategy.
    """

    def __init__(
        self,
        repository: HubRepository,
        *,
        output_dir: str | Path,
        strategy: str = "every_save",
        always_push: bool = False,
        prefix: str = "checkpoint",
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"hub_strategy={strategy!r} is not known; give one of {', '.join(STRATEGIES)}")
        self.repository = repository
        self.output_dir = Path(output_dir).expanduser().absolute()
        self.strategy = strategy
        self.always_push = always_push
        self.prefix = prefix
        self._queue = PushQueue()
        self._last_push: Future[str] | None = None

    @classmethod
    def from_arguments(cls, args: Any) -> HubCallback:
        """Return the callback that the `hub_*` fields and `output_dir` of `args` describe."""
        output_dir = Path(args.output_dir).expanduser().absolute()
        repository = HubRepository(
            args.hub_model_id or output_dir.name,
            token=args.hub_token,
            private=args.hub_private_repo,
            revision=args.hub_revision,
        )
        strategy = getattr(args.hub_strategy, "value", args.hub_strategy)
        return cls(repository, output_dir=output_dir, strategy=strategy, always_push=args.hub_always_push)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the repository, in the background, so that a wrong token shows before hours of training."""
        if state.is_world_process_zero:
            self._queue.submit(self.repository.make)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Push what the strategy says of the checkpoint that was just completed."""
        if not state.is_world_process_zero or self.strategy == "end":
            return
        step = state.global_step
        if not self.always_push and self._last_push is not None and not self._last_push.done():
            logger.info("step %d is not pushed: an earlier push is still under way", step)
            return
        checkpoint = self.output_dir / names.checkpoint_name(self.prefix, step)
        as_folder = {"checkpoint": LAST, "all_checkpoints": checkpoint.name}.get(self.strategy)

        def fill(folder: Path) -> None:
            snapshot.link_files(checkpoint, folder, _model_files(checkpoint))
            snapshot.copy_files(self.output_dir, folder, self._pushed_files(self.output_dir))
            if as_folder is not None:
                snapshot.link_files(checkpoint, folder / as_folder, snapshot.files_below(checkpoint))

        self._push(f"Training in progress, step {step}", fill, [LAST] if as_folder == LAST else [])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Push the run's final files, unless an `error` ended it; wait for all pushes and sum up."""
        if not state.is_world_process_zero:
            return
        if kwargs.get("error") is None:
            best = state.best_global_step if getattr(args, "load_best_model_at_end", False) else None
            step = state.global_step if best is None else best
            checkpoint = self.output_dir / names.checkpoint_name(self.prefix, step)
            self._push_folder(self.output_dir, "End of training", checkpoint)
        if self._queue.is_busy():
            logger.info("waiting for the pushes to %s", self.repository.url)
        self._queue.wait()
        if failures := self._queue.failures:
            logger.error("not all of the run is at %s: %s", self.repository.url, "; ".join(failures))
        else:
            logger.info("the run is pushed to %s", self.repository.url)

    def push_to_hub(
        self, folder: str | Path, commit_message: str = "End of training", blocking: bool = True
    ) -> str | Future[str]:
        """Push the files of `folder`, checkpoints and names that begin with `_` or `.` excepted.

        Args:
            folder: copied at once; it may change as soon as this returns.
            commit_message: first line of the commit.
            blocking: wait for this push, and those before it.

        Returns:
            The commit's address, or without `blocking` the future of it.

        Raises:
            PushError: it failed; without `blocking`, the future raises it.
        """
        future = self._push_folder(Path(folder).expanduser().absolute(), commit_message, None)
        return future.result() if blocking else future

    def _push_folder(self, source: Path, message: str, checkpoint: Path | None) -> Future[str]:
        def fill(folder: Path) -> None:
            snapshot.copy_files(source, folder, self._pushed_files(source))
            # A run that saves no model of its own at the end has one in a checkpoint.
            if checkpoint is not None and (checkpoint / names.MANIFEST).exists():
                snapshot.link_files(checkpoint, folder, _model_files(checkpoint))

        return self._push(message, fill, [])

    def _push(self, message: str, fill: Callable[[Path], None], mirror: list[str]) -> Future[str]:
        folder = names.temporary(self.output_dir, "pushing", self.prefix)
        reason = None
        try:
            files.make_folders(folder)
            fill(folder)
        except (OSError, CheckpointError) as error:
            # A full disk, say, must not end the run: the checkpoint itself is safe.
            reason = f"{message!r} was not pushed: its files could not be copied: {error}"

        def job() -> str:
            try:
                if reason is not None:
                    raise PushError(reason)
                return self.repository.upload(folder, message, mirror=mirror)
            finally:
                if folder.exists():
                    staging.discard(folder)

        self._last_push = self._queue.submit(job)
        return self._last_push

    def _pushed_files(self, source: Path) -> list[str]:
        return snapshot.files_below(source, (*_AT_HOME, f"{self.prefix}-"))


def _model_files(checkpoint: Path) -> list[str]:
    # What makes a loadable model: its tensors and what the caller added, such as config.json and a tokenizer.
    described = manifest.read(checkpoint)
    return [name for name in ("model.safetensors",) if name in described.files] + described.extra_files()
