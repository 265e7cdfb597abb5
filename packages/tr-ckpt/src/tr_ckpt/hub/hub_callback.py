"""Push a run's model and checkpoints to the Hub while it trains.

At the end of the run a summary says what is on the Hub, what is not, and how to push the missing files.
"""

from __future__ import annotations

import json
import logging
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tr_ckpt import files, names, processes
from tr_ckpt.errors import CheckpointError, PushError, first_three
from tr_ckpt.hub import push_queue, snapshot
from tr_ckpt.hub.hub_repository import HubRepository
from tr_ckpt.hub.push_queue import Push, PushQueue
from tr_log.formatting import printable
from tr_log.tracker import EveryEvent

logger = logging.getLogger(__name__)


def log_summary(
    failures: Sequence[tuple[str, str]],
    repository: HubRepository,
    output_dir: Path,
    prefix: str,
    missing: Mapping[str, Path],
    is_complete: bool,
) -> None:
    """Log how the pushes of a run ended.

    Args:
        failures: label and reason of each push that failed.
        repository: the target of the pushes.
        output_dir: the run's folder.
        prefix: the first part of the names of checkpoints.
        missing: checkpoints that should be on the Hub and are not, by their path there.
        is_complete: whether a later push uploaded everything.
    """
    url = repository.url
    if not failures and is_complete:
        logger.info("the run is pushed to %s", url)
        return
    names = ", ".join(repr(label) for label, _ in failures) or ", ".join(missing)
    why = failures[-1][1] if failures else "it failed before"
    if is_complete:
        logger.warning("the run is pushed to %s, but later than planned: %s; last: %s", url, names, why)
        return
    logger.error(
        "not all of the run is at %s; not pushed: %s; last: %s. Everything is in %s: push it later with "
        "trainer.push_to_hub(), or with: %s",
        url,
        names,
        why,
        output_dir,
        " && ".join(_upload_commands(repository, output_dir, prefix, missing)),
    )


def _upload_commands(
    repository: HubRepository, output_dir: Path, prefix: str, missing: Mapping[str, Path]
) -> list[str]:
    options = [] if repository.revision is None else ["--revision", repository.revision]
    inside = [f"{name}/*" if name in snapshot.TRACKERS else name for name in (*snapshot.PRIVATE_NAMES, f"{prefix}-*")]
    exclude = ["--exclude", *inside, *(f"*/{name}" for name in inside)]
    commands = [["hf", "upload", repository.repo_id, str(output_dir), ".", *options, *exclude]]
    commands += [["hf", "upload", repository.repo_id, str(folder), path, *options] for path, folder in missing.items()]
    return [shlex.join(command) for command in commands]


STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")

LAST = "last-checkpoint"
END = "End of training"

# How many pushes may wait: each holds a copy, whose files keep their space on the disk.
MOST_WAITING = 3

# How long the start of training waits to learn whether the Hub refuses the repository.
REFUSAL_WITHIN_S = 3.0


class HubCallback(EveryEvent):
    """Push to a repository of the Hub, in the background, from copies that training cannot change.

    A push that fails is logged as an error at once and again at the end of the run. The run continues, and the next
    push uploads what is missing.

    Args:
        repository: where to push.
        output_dir: the run's folder.
        strategy: what a save pushes: `end` nothing; `every_save` the model; `checkpoint` also the checkpoint, as
            `last-checkpoint`; `all_checkpoints` also the checkpoint, under its own name. The end of the run pushes the
            files of `output_dir` in any case, and the last save unless it is on the Hub.
        always_push: whether a save is pushed also while an earlier push runs; it then waits. At most three wait; one
            more drops the oldest of them.
        prefix: the first part of the names of checkpoints.
        by_epoch: whether the commits of saves are named by epochs, from the checkpoint's `trainer_state.json`, instead
            of by steps.
        wait_limit_s: how long the end of the run waits for pushes; None is ten minutes plus the upload time of the
            remaining bytes at 2 MB a second.

    Attributes:
        waiting: returns a block for such a wait; a trainer may set one that shows it.

    Raises:
        ValueError: the strategy does not exist.
    """

    def __init__(
        self,
        repository: HubRepository,
        *,
        output_dir: str | Path,
        strategy: str = "every_save",
        always_push: bool = False,
        prefix: str = "checkpoint",
        by_epoch: bool = False,
        wait_limit_s: float | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"hub_strategy={strategy!r} is not known; give one of {', '.join(STRATEGIES)}")
        self.repository = repository
        self.output_dir = Path(output_dir).expanduser().absolute()
        self.strategy = strategy
        self.always_push = always_push
        self.prefix = prefix
        self.by_epoch = by_epoch
        self.wait_limit_s = wait_limit_s
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._queue = PushQueue(MOST_WAITING, push_queue.limit_s if wait_limit_s is None else lambda left: wait_limit_s)
        self._made: Future[Any] | None = None
        self._last_push: Future[Any] | None = None
        self._lock = threading.Lock()
        self._follows_arguments = False  # a later training may have another `output_dir`
        self._said: set[str] = set()  # what was left out of pushes
        self._newest: Path | None = None  # the last checkpoint, while it is not on the Hub
        self._missing: dict[str, Path] = {}  # checkpoints whose push failed, by their path on the Hub

    @classmethod
    def from_arguments(cls, args: Any) -> HubCallback:
        """Return the callback that the `hub_*` fields, `output_dir` and `save_strategy` of `args` describe."""
        callback = cls(
            HubRepository.from_arguments(args),
            output_dir=args.output_dir,
            strategy=getattr(args.hub_strategy, "value", args.hub_strategy),
            always_push=args.hub_always_push,
            by_epoch=str(getattr(args, "save_strategy", "")) == "epoch",
        )
        callback._follows_arguments = True
        return callback

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the repository in the background, so that training starts also while the Hub is unreachable."""
        if state.is_world_process_zero:
            label = f"making {self.repository.repo_id}"
            self._made = self._queue.submit(Push(label, self.repository.make, is_awaited=False))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to train if the Hub refuses the repository: a wrong token shows before hours of training.

        Raises:
            PushError: the Hub refused.
        """
        if self._follows_arguments:
            self.output_dir = Path(args.output_dir).expanduser().absolute()
        if self._made is None:
            return
        try:
            error = self._made.exception(REFUSAL_WITHIN_S)
        except TimeoutError:
            return
        if isinstance(error, PushError) and error.status is not None and not error.may_pass:
            raise PushError(
                f"{error} — nothing could be pushed; give a token that may write there as hub_token or HF_TOKEN, "
                "another hub_model_id, or push_to_hub=False",
                status=error.status,
            )

    def on_checkpoint(self, folder: Path, step: int) -> None:
        """Push what the strategy selects of a complete checkpoint; runs in the thread that completed it."""
        if self.strategy == "end":
            return
        with self._lock:
            self._newest = folder
        if not self.always_push and self._last_push is not None and not self._last_push.done():
            logger.info("step %d is not pushed: an earlier push is still under way", step)
            return
        self._push_checkpoint(folder, step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Push the final files, or the last save if an `error` ended the run; wait for all, and log a summary."""
        if not state.is_world_process_zero:
            return
        failures, error = self._queue.failures, kwargs.get("error")
        with push_queue.interrupts(after_signal=isinstance(error, SystemExit)) as caught:
            is_ready = self._wait(caught)
            if is_ready and error is None:
                self._push_end(args, state)
            elif is_ready and self._newest is not None:
                self._push_checkpoint(self._newest, state.global_step)
            elif not is_ready and error is None:
                failures.append((END, f"{END!r} was not pushed: the pushes before it were not done"))
            self._wait(caught)
            if failures or self._last_push is not None:
                is_complete = is_ready and self._newest is None and not self._missing and _succeeded(self._last_push)
                missing = {**self._missing, **self._places(self._newest)}
                log_summary(failures, self.repository, self.output_dir, self.prefix, missing, is_complete)
            failures.clear()

    def push_to_hub(
        self,
        folder: str | Path,
        commit_message: str = END,
        blocking: bool = True,
        *,
        repository: HubRepository | None = None,
    ) -> str | Future[str]:
        """Push the files of `folder`, except checkpoints, links out of it or to folders, and private names.

        Private are, at every depth, names that begin with `_` or `.`, folders of trackers, and what a run or a shell
        leaves of crashes and logs. What is left out is logged once. Checkpoints whose push failed before go with it.

        Args:
            folder: the folder to push; it may change once this returns.
            commit_message: first line of the commit.
            blocking: wait for this push, and those before it.
            repository: the target of this push; None is this object's own.

        Returns:
            The commit's address, or without `blocking` a future of it.

        Raises:
            PushError: it failed, or took longer than the limit at the end of a run; without `blocking`, the future
                raises it.
        """
        repository = self.repository if repository is None else repository
        source = Path(folder).expanduser().absolute()
        future = self._push(
            commit_message, lambda copy: snapshot.copy_files(source, copy, self._pushed_files(source)), {}, repository
        )
        if not blocking:
            return future
        with push_queue.interrupts() as caught:
            if not self._wait(caught):
                logger.error("not pushed: %s", "; ".join(text for _, text in self._queue.failures))
        return future.result()

    def _wait(self, caught: list[int]) -> bool:
        with self.waiting():
            return not caught and push_queue.wait_for(self._queue, self.repository.url, caught, self.wait_limit_s)

    def _places(self, checkpoint: Path | None) -> dict[str, Path]:
        """Return the path of a checkpoint on the Hub by the strategy, if it is pushed."""
        if checkpoint is None or self.strategy not in ("checkpoint", "all_checkpoints"):
            return {}
        return {LAST if self.strategy == "checkpoint" else checkpoint.name: checkpoint}

    def _push_checkpoint(self, checkpoint: Path, step: int) -> None:
        def fill(copy: Path) -> None:
            snapshot.link_files(checkpoint, copy, snapshot.model_files(checkpoint))
            snapshot.copy_files(self.output_dir, copy, self._pushed_files(self.output_dir))

        message = f"Training in progress, {self._progress(checkpoint, step)}"
        self._push(message, fill, self._places(checkpoint), self.repository, saved=checkpoint)

    def _push_end(self, args: Any, state: Any) -> None:
        best = state.best_global_step if getattr(args, "load_best_model_at_end", False) else None
        step = state.global_step if best is None else best
        checkpoint = self.output_dir / names.checkpoint_name(self.prefix, step)

        def fill(copy: Path) -> None:
            snapshot.copy_files(self.output_dir, copy, self._pushed_files(self.output_dir))
            # If the run saves no final model, a checkpoint provides it.
            if (checkpoint / names.MANIFEST).exists():
                snapshot.link_files(checkpoint, copy, snapshot.model_files(checkpoint))

        newest = self._newest
        self._push(END, fill, self._places(newest), self.repository, saved=newest)

    def _push(
        self,
        message: str,
        fill: Callable[[Path], None],
        checkpoints: dict[str, Path],
        repository: HubRepository,
        *,
        saved: Path | None = None,
    ) -> Future[Any]:
        """Copy the files to push, and push the copy in the background.

        Args:
            message: first line of the commit.
            fill: puts files into the copy.
            checkpoints: checkpoints to push, by their path; those whose push failed before are added.
            repository: the target.
            saved: the checkpoint that is on the Hub once this push is done.
        """
        with self._lock:
            carried = {**self._missing, **checkpoints}
            self._missing.clear()
        copy = processes.temporary(self.output_dir, "pushing", self.prefix)
        reason = None
        try:
            files.make_folders(copy)
            fill(copy)
            snapshot.link_checkpoints(copy, carried, required=checkpoints)
        except (OSError, CheckpointError) as error:
            # A full disk, for example, must not end the run: the checkpoint itself is safe.
            reason = f"{message!r} was not pushed: its files could not be copied: {error}"

        def work() -> str:
            if reason is not None:
                raise PushError(reason)
            return repository.upload(copy, message, mirror=list(carried))

        def note(future: Future[Any]) -> None:
            with self._lock:
                for place, folder in carried.items():
                    if not _succeeded(future):
                        self._missing[place] = folder
                    else:
                        self._missing.pop(place, None)
                if _succeeded(future) and self._newest == saved:
                    self._newest = None

        push = Push(message, work, 0 if reason else snapshot.size(copy), lambda: snapshot.discard(copy))
        push.future.add_done_callback(note)
        self._last_push = self._queue.submit(push)
        return push.future

    def _progress(self, checkpoint: Path, step: int) -> str:
        if self.by_epoch:
            try:
                state = json.loads((checkpoint / "trainer_state.json").read_bytes())
                return f"epoch {int(state['epoch'])}"
            except (OSError, ValueError, KeyError, TypeError, OverflowError):  # another loop may keep no such file
                pass
        return f"step {step}"

    def _pushed_files(self, source: Path) -> list[str]:
        found, left_out = snapshot.public_files(source, self.prefix)
        new = [text for text in left_out if text not in self._said]
        self._said.update(new)
        if new:
            logger.warning("not pushed with %s: %s", source, printable(first_three(new)))
        return found


def _succeeded(future: Future[Any] | None) -> bool:
    return future is not None and future.done() and future.exception() is None
