"""A repository of the Hub: made on first use, filled by commits, read at one commit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tr_ckpt.errors import PushError
from tr_ckpt.hub import snapshot
from tr_ckpt.hub.retrying import Secret, retried
from tr_log.terminal import without_library_bars

T = TypeVar("T")


class HubRepository:
    """A model repository on the Hub.

    The constructor sends no request.

    Args:
        repo_id: `name` or `owner/name`; without an owner it is the token's.
        token: access token; None takes the one of the environment or the Hub's own login. No message, log,
            `repr` or file of this class contains it.
        private: whether a new repository is private; None leaves it to the owner's setting.
        revision: branch to push to, made if it does not exist; for reading also a tag or a commit. None is `main`.
        endpoint: address of the Hub; None takes `HF_ENDPOINT` or the public one.
        retry_delays_s: how long to wait before each retry after a temporary failure, unless the Hub asks for a longer
            wait.

    Raises:
        ImportError: huggingface_hub is not installed.
        ValueError: `repo_id` is not a valid name, or the Hub's address holds a password.
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
        given = Secret((token or "").strip())  # a token file ends with a line break
        del token  # so that no display of local variables shows it
        try:
            from huggingface_hub import HfApi, get_token
        except ImportError:
            raise ImportError("the Hub needs huggingface_hub; pip install 'tr-ckpt[hub]'") from None
        self.repo_id = repo_id
        self.revision = revision
        self.private = private
        _check_name(repo_id)
        self._api = HfApi(endpoint=endpoint, token=given.reveal() or None)
        del endpoint
        if host := _host_of_address_with_password(self._api):
            raise ValueError(
                f"the address of the Hub at {host} holds a user name or a password, which would be in every message; "
                "give the address alone, and the token as hub_token or HF_TOKEN"
            )
        self._delays_s = tuple(retry_delays_s)
        self._secret = given if given else Secret(get_token() or "")
        self._made = False

    @classmethod
    def from_arguments(cls, args: Any) -> HubRepository:
        """Return the repository that the `hub_*` fields and `output_dir` of `args` describe.

        Raises:
            ValueError: `hub_model_id`, or the name of `output_dir` if that is unset, is not a valid name.
        """
        name = Path(args.output_dir).expanduser().absolute().name
        try:
            return cls(
                args.hub_model_id or name,
                token=args.hub_token,
                private=args.hub_private_repo,
                revision=args.hub_revision,
            )
        except ValueError as error:
            if args.hub_model_id:
                raise
            raise ValueError(f"{error}; it is the name of output_dir, as hub_model_id is not set") from None

    def __repr__(self) -> str:
        return f"HubRepository({self.repo_id!r}, revision={self.revision!r})"

    @property
    def endpoint(self) -> str:
        """Address of the Hub."""
        return self._api.endpoint

    @property
    def url(self) -> str:
        """The repository's web page."""
        return f"{self.endpoint}/{self.repo_id}"

    def but(
        self,
        *,
        repo_id: str | None = None,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
    ) -> HubRepository:
        """Return a copy with the given changes, itself if there are none; the address and the delays stay.

        Raises:
            ValueError: `repo_id` is not a valid name.
        """
        given = Secret((token or "").strip())
        del token
        if not given and repo_id is None and private is None and revision is None:
            return self
        other = copy.copy(self)
        if repo_id is not None:
            _check_name(repo_id)
            other.repo_id, other._made = repo_id, False
        if given:
            from huggingface_hub import HfApi

            other._api = HfApi(endpoint=self.endpoint, token=given.reveal())
            other._secret = given
        other.private = self.private if private is None else private
        if revision is not None:
            other.revision, other._made = revision, False
        return other

    def ask(self, what: str, question: Callable[[Any], T]) -> T:
        """Return what `question` returns; it gets the client, and is called again after a temporary failure.

        Raises:
            PushError: it failed; the message begins with `what`.
        """

        def quietly() -> T:
            with without_library_bars():
                return question(self._api)

        return retried(what, quietly, self._delays_s, self._secret)

    def make(self) -> None:
        """Make the repository and its branch, unless they exist; `repo_id` then includes the owner.

        Raises:
            PushError: it failed, also when tried again.
        """
        if not self._made:
            what = f"{self.repo_id} could not be made on {self.endpoint}"
            retried(what, self._make, self._delays_s, self._secret)
            self._made = True

    def upload(self, folder: Path, message: str, *, mirror: Sequence[str] = ()) -> str:
        """Upload all files of `folder` as one commit, with retries after temporary failures.

        If the answer to a commit was lost, the retry finds every file up to date and makes no second commit. Commits
        of others in between are kept.

        Args:
            folder: must not change until this returns.
            message: first line of the commit.
            mirror: subfolders of the repository that will hold nothing but what is uploaded.

        Returns:
            The commit's address.

        Raises:
            PushError: it failed, also when tried again.
        """
        what = f"{message!r} was not pushed to {self.repo_id}"
        try:
            self.make()
        except PushError as error:
            failure = error
        else:
            failure = None
        if failure is not None:
            raise PushError(f"{what}: {failure}", status=failure.status, may_pass=failure.may_pass)
        return self.ask(what, lambda api: self._commit(api, folder, message, mirror))

    def _make(self) -> None:
        made = self._api.create_repo(self.repo_id, private=self.private, exist_ok=True)
        _check_name(made.repo_id)  # this name comes from the Hub
        self.repo_id = made.repo_id
        if self.revision not in (None, "main") and not self.revision.startswith("refs/"):
            self._api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)

    def _commit(self, api: Any, folder: Path, message: str, mirror: Sequence[str]) -> str:
        # Not upload_folder: with Xet that makes several commits of a large folder, and a reader between two of them
        # sees half a checkpoint.
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        head = api.repo_info(self.repo_id, revision=self.revision).sha
        names = snapshot.files_below(folder)
        operations: list[Any] = [CommitOperationAdd(path_in_repo=n, path_or_fileobj=folder / n) for n in names]
        if mirror:
            there = api.list_repo_files(self.repo_id, revision=head)
            inside = tuple(f"{name}/" for name in mirror)
            surplus = sorted(name for name in set(there) - set(names) if name.startswith(inside))
            operations += [CommitOperationDelete(path_in_repo=name) for name in surplus]
        # Refused if the branch moved: by another's commit, or by an earlier try that the Hub accepted after all.
        commit = api.create_commit(
            self.repo_id, operations, commit_message=message, revision=self.revision, parent_commit=head
        )
        return commit.commit_url


def _check_name(repo_id: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise ValueError(
            f"{repo_id!r} can be no repository on the Hub: give hub_model_id as name or owner/name, of letters, "
            "digits, '-', '_' and '.', at most 96 characters, without '--', '..' or '.git' at the end"
        ) from None


def _host_of_address_with_password(api: Any) -> str | None:
    address = urlsplit(api.endpoint)
    return address.hostname if address.username or address.password else None
