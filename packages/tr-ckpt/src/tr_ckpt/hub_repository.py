"""Upload folders to a repository of the Hub."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tr_ckpt.errors import PushError

logger = logging.getLogger(__name__)

# Answers that may be another one a moment later; all others below 500 mean that the request is at fault.
_TRANSIENT = (408, 412, 429)


class HubRepository:
    """A model repository on the Hub, made when it is first needed.

    Args:
        repo_id: `name` or `owner/name`; without an owner it is the token's.
        token: access token; None takes the one of the environment or the Hub's own login. It is in no
            message, log or `repr` of this class.
        private: whether a repository that is made here is private; None leaves it to the owner's setting.
        revision: branch to push to, made if it is missing; None is `main`.
        endpoint: address of the Hub; None takes `HF_ENDPOINT` or the public one.
        retry_delays_s: how long to wait before each further try of a push that failed for a passing reason.

    Raises:
        ImportError: huggingface_hub is not installed.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        endpoint: str | None = None,
        retry_delays_s: Sequence[float] = (1, 4, 16),
    ) -> None:
        try:
            from huggingface_hub import HfApi, get_token
        except ImportError:
            raise ImportError("the Hub needs huggingface_hub; pip install 'tr-ckpt[hub]'") from None
        self.repo_id = repo_id
        self.revision = revision
        token = token.strip() if token else None  # a file that the token was read from ends with a line break
        self._api = HfApi(endpoint=endpoint, token=token)
        self._secret = token or get_token()
        self._private = private
        self._retry_delays_s = tuple(retry_delays_s)
        self._made = False

    def __repr__(self) -> str:
        return f"HubRepository({self.repo_id!r}, revision={self.revision!r})"

    @property
    def url(self) -> str:
        """Where people find the repository."""
        return f"{self._api.endpoint}/{self.repo_id}"

    def make(self) -> None:
        """Make the repository and its branch, unless they exist; `repo_id` then names the owner.

        Raises:
            PushError: it did not work, also when tried again.
        """
        if not self._made:
            self._retry(f"{self.repo_id} could not be made", self._make)
            self._made = True

    def upload(self, folder: Path, message: str, *, mirror: Sequence[str] = ()) -> str:
        """Upload all files of `folder` as one commit, trying again where the fault may pass.

        Args:
            folder: must stay as it is until this returns.
            message: first line of the commit.
            mirror: subfolders of the repository that are to hold nothing but what is uploaded.

        Returns:
            The commit's address.

        Raises:
            PushError: it did not work, also when tried again.
        """
        self.make()

        def once() -> str:
            with _without_progress_bars():
                commit = self._api.upload_folder(
                    repo_id=self.repo_id,
                    folder_path=folder,
                    commit_message=message,
                    revision=self.revision,
                    delete_patterns=[f"{name}/*" for name in mirror] or None,
                )
            return commit.commit_url

        return self._retry(f"{message!r} was not pushed to {self.repo_id}", once)

    def _make(self) -> None:
        made = self._api.create_repo(self.repo_id, private=self._private, exist_ok=True)
        self.repo_id = made.repo_id
        if self.revision not in (None, "main") and not self.revision.startswith("refs/"):
            self._api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)

    def _retry(self, what: str, work: Any) -> Any:
        for delay_s in (*self._retry_delays_s, None):
            try:
                return work()
            except Exception as error:  # any library below may raise its own kind
                reason = self._scrub(_reason(error))
                if delay_s is None or not _may_pass(error):
                    # Without the cause: a request's headers, which a traceback may show, hold the token.
                    raise PushError(f"{what}: {reason}") from None
                logger.warning("%s (%s); trying again in %g s", what, reason, delay_s)
                time.sleep(delay_s)
        raise AssertionError  # the loop's last round returns or raises

    def _scrub(self, text: str) -> str:
        if self._secret:
            for form in (self._secret, repr(self._secret)[1:-1]):  # an error may quote it with escapes
                text = text.replace(form, "<token>")
        return text


def _reason(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if error.__cause__ is None else f"{text}, because of {_reason(error.__cause__)}"


def _may_pass(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:  # the client wraps what happened to one file's upload
        status = getattr(getattr(seen, "response", None), "status_code", None)
        if status is not None:
            return status >= 500 or status in _TRANSIENT
        if isinstance(seen, FileNotFoundError | PermissionError | IsADirectoryError):
            return False
        seen = seen.__cause__
    return not isinstance(error, ValueError | TypeError)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
