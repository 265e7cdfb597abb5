"""Make relative folders absolute, once: what is written later must not go where `os.chdir` went meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr_args.constraints import NOT_UTF_8
from tr_args.errors import ArgumentsError, Problem

if TYPE_CHECKING:
    from tr_args.training_arguments import TrainingArguments

FOLDERS = ("output_dir", "logging_dir")


def make_folders_absolute(args: TrainingArguments) -> TrainingArguments:
    """Make `output_dir` and `logging_dir` absolute in place; addresses such as `gs://...` stay. Returns the arguments.

    It is no assignment: where the value came from, and whether anything was assigned, stays as it was. What is written
    of the arguments holds the folder as it was given: a path of this machine says nothing elsewhere.

    Raises:
        ArgumentsError: a folder is relative, and the working directory is gone or not UTF-8 text.
    """
    for name in FOLDERS:
        folder = getattr(args, name)
        if not isinstance(folder, str) or "://" in folder or Path(folder).is_absolute():
            continue
        try:
            absolute = str(Path(folder).absolute())
            absolute.encode()
        except (FileNotFoundError, UnicodeEncodeError) as error:
            message = "is relative to a working directory that does not exist any more; give an absolute path"
            if isinstance(error, UnicodeEncodeError):
                message = f"in the working directory it {NOT_UTF_8}"
            raise ArgumentsError([Problem(name, folder, message, args.origin(name))]) from None
        object.__setattr__(args, name, absolute)
        # A dict of its own: a copy of the arguments may have been given another folder.
        given = {**vars(args).get("_given_folders", {}), name: (absolute, folder)}
        object.__setattr__(args, "_given_folders", given)
    return args


def as_given(args: Any, name: str) -> Any:
    """Return an argument's value; of a folder that was made absolute here, what was given."""
    value = getattr(args, name)
    absolute, given = vars(args).get("_given_folders", {}).get(name, (None, None))
    return given if absolute is not None and value == absolute else value
