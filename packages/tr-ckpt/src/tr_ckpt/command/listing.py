"""`trainer ckpt ls` and `verify`: list checkpoints, with or without reading every byte.

`verify` also opens each file as a load would.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from tr_ckpt import discovery, names, processes, reader, reads
from tr_ckpt.command import selection
from tr_ckpt.command.selection import COMPLETE, DAMAGED, UNREADABLE, Entry
from tr_ckpt.command.terminal import Column, Progress, render, say, say_lines, terminal_width
from tr_ckpt.errors import Damage, UnreadableError
from tr_ckpt.files import BLOCK_BYTES
from tr_ckpt.manifest import Manifest
from tr_log.formatting import printable, size


def run_ls(arguments: argparse.Namespace) -> int:
    """List the checkpoints; return 1 if one is damaged."""
    directory = Path(arguments.directory).expanduser()
    entries = selection.select(directory, arguments.prefix)
    show(directory, entries, as_json=arguments.json, good=selection.COMPLETE)
    return int(any(entry.condition == DAMAGED for entry in entries))


def show(directory: Path, entries: list[Entry], *, as_json: bool, good: str) -> None:
    """Print entries, the newest last in them, as a table by step or as JSON.

    Args:
        directory: their folder.
        entries: what to print.
        as_json: whether to print JSON for other programs.
        good: the name of the condition of a checkpoint without a fault.
    """
    listed = describe(directory, entries, good)
    left = [] if (directory / names.MANIFEST).exists() else _abandoned(directory)
    if as_json:
        print(json.dumps({"checkpoints": listed, "left_behind": left}, indent=2, allow_nan=False))
        return
    width = terminal_width()
    say_lines(render(_columns(listed), width))
    for paragraph in (_parts(listed), _problems(listed), _order(entries), _left(left)):
        if paragraph:
            say()
        for line in paragraph:
            say_lines(printable(line) if width is None else _wrap(printable(line), width))


def _wrap(line: str, width: int) -> str:
    return textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def describe(directory: Path, entries: list[Entry], good: str) -> list[dict[str, Any]]:
    """Return the facts about each checkpoint, by ascending step, as JSON values."""
    newest = selection.newest(entries)
    # The checkpoint with the longest history decides which is best.
    knowing = newest or next((entry for entry in reversed(entries) if entry.condition == selection.FOREIGN), None)
    best = None if knowing is None else selection.best_step(selection.read_state(knowing.found.path))
    listed = [_describe(entry, good) for entry in sorted(entries, key=_by_step)]
    for each in listed:
        # A checkpoint that was named alone is not known to be the newest.
        is_newest = newest is not None and each["name"] == newest.found.name and newest.found.path != directory
        each["marks"] = ["newest"] * is_newest + ["best"] * (best is not None and each["step"] == best)
    return listed


def _by_step(entry: Entry) -> int:
    return -1 if entry.step is None else entry.step


def _describe(entry: Entry, good: str) -> dict[str, Any]:
    folder, described = entry.found.path, entry.described
    metric = selection.key_metric(folder, selection.read_state(folder), entry.step)
    return {
        "name": entry.found.name,
        "path": str(folder),
        "step": entry.step,
        "sequence": None if described is None else described.sequence,
        "bytes": selection.bytes_below(folder),
        "ranks": None if described is None else described.world_size,
        "saved_at": None if described is None else described.saved_at,
        "metric": None if metric is None else {"name": metric[0], "value": _strict(metric[1])},
        "parts": [] if described is None else sorted(described.parts),
        "files": [] if described is None else sorted(described.files),
        "versions": {} if described is None else described.versions,
        "condition": good if entry.condition == selection.COMPLETE else entry.condition,
        "problem": entry.problem,
    }


def _columns(listed: list[dict[str, Any]]) -> list[Column]:
    metrics = {each["metric"]["name"] for each in listed if each["metric"]}
    heading = metrics.pop() if len(metrics) == 1 else "metric"
    return [
        Column("checkpoint", [each["name"] for each in listed]),
        Column("step", [_text(each["step"]) for each in listed], right=True, spare=5 * _named_by_step(listed)),
        Column("size", [size(each["bytes"]) for each in listed], right=True, spare=1),
        Column("ranks", [_text(each["ranks"]) for each in listed], right=True, spare=4),
        Column("saved at (UTC)", [_time(each["saved_at"]) for each in listed], spare=3),
        Column(heading, [_metric(each["metric"], heading) for each in listed], right=True, spare=2),
        Column("mark", [", ".join(each["marks"]) for each in listed]),
        Column("condition", [each["condition"] for each in listed]),
    ]


def _named_by_step(listed: list[dict[str, Any]]) -> bool:
    return all(each["name"].endswith(f"-{each['step']}") for each in listed)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _time(saved_at: str | None) -> str:
    return (saved_at or "").removesuffix("+00:00").replace("T", " ")


def _metric(metric: dict[str, Any] | None, heading: str) -> str:
    if metric is None:
        return ""
    value = metric["value"] if isinstance(metric["value"], str) else f"{metric['value']:.5g}"
    return value if metric["name"] == heading else f"{metric['name']} {value}"


def _strict(value: float) -> float | str:
    return value if value - value == 0 else str(value)  # JSON has neither NaN nor infinities


def _parts(listed: list[dict[str, Any]]) -> list[str]:
    holders: dict[str, list[str]] = {}
    for each in listed:
        if each["parts"]:
            holders.setdefault(" ".join(each["parts"]), []).append(each["name"])
    if len(holders) == 1:
        return [f"parts: {parts}" for parts in holders]
    return [f"parts of {_range(names)}: {parts}" for parts, names in holders.items()]


def _range(of: list[str]) -> str:
    return ", ".join(of) if len(of) <= 3 else f"{of[0]}, {of[1]} … {of[-1]} ({len(of)})"


def _problems(listed: list[dict[str, Any]]) -> list[str]:
    having: dict[str, list[str]] = {}
    for each in listed:
        if each["problem"]:
            having.setdefault(each["problem"], []).append(each["name"])
    return [f"{_range(names)}: {problem}" for problem, names in having.items()]


def _order(entries: list[Entry]) -> list[str]:
    """Explain the mark if the newest checkpoint does not have the highest step."""
    newest = selection.newest(entries)
    complete = [entry for entry in entries if entry.condition == selection.COMPLETE]
    if newest is None or (last := max(complete, key=_by_step)) is newest:
        return []
    return [
        f"{newest.found.name} was saved after {last.found.name}: a run went back, or started over. Resuming takes "
        f"{newest.found.name}."
    ]


def _abandoned(directory: Path) -> list[dict[str, Any]]:
    return [
        {
            "name": left.path.name,
            "kind": left.kind,
            "target": left.target,
            # Not known from here where its maker cannot be seen.
            "abandoned": processes.is_abandoned(left) if processes.is_maker_visible(left) else None,
        }
        for left in names.temporaries(directory)
    ]


_DOING = {
    "writing": "writing",
    "records": "writing",
    "replaced": "replacing",
    "removed": "removing",
    "pushing": "pushing",
    "fetched": "fetching",
    "lock": "locking",
}


def _left(left: list[dict[str, Any]]) -> list[str]:
    lines = []
    for each in left:
        doing = f"{_DOING.get(each['kind'], each['kind'])} {each['target']}"
        if each["abandoned"]:
            lines.append(f"{each['name']}: left by a run that ended while {doing}; the next save clears it away")
        elif each["abandoned"] is None:
            lines.append(
                f"{each['name']}: of a run on another machine or in another container, {doing}; a run that saves here "
                f"clears it away once nothing has changed in it for {processes.STILL_S:.0f} s"
            )
        else:
            lines.append(f"{each['name']}: a run is {doing} now")
    return lines


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify the checkpoints and print what is wrong; return 1 if one is damaged or none was verified."""
    directory = Path(arguments.directory).expanduser()
    entries = verify(selection.select(directory, arguments.prefix))
    show(directory, entries, as_json=arguments.json, good="verified")
    conditions = {entry.condition for entry in entries}
    return int(DAMAGED in conditions or UNREADABLE in conditions or COMPLETE not in conditions)


def verify(entries: list[Entry]) -> list[Entry]:
    """Return the entries; those whose files differ from what was written get another condition."""
    total = sum(entry.described.total_bytes for entry in entries if entry.described and entry.condition == COMPLETE)
    progress = Progress(total)
    try:
        return [_verify_if_readable(entry, progress) for entry in entries]
    finally:
        progress.end()


def _verify_if_readable(entry: Entry, progress: Progress) -> Entry:
    try:
        return _verify(entry, progress)
    except UnreadableError as error:
        return replace(entry, condition=UNREADABLE, problem=str(error))


def _verify(entry: Entry, progress: Progress) -> Entry:
    described = entry.described
    if entry.condition == COMPLETE and described is not None:
        damages: list[Damage] = []
        for name in described.files:
            progress.begin(f"{entry.found.name}/{name}")
            damages += _damage(entry.found.path, described, name, progress)
        if damages:
            return replace(entry, condition=DAMAGED, problem=_said(damages))
        if problems := reader.problems(entry.found.path, described):
            return replace(entry, condition=UNREADABLE, problem=_said(problems))
    elif entry.condition == DAMAGED and described is not None:  # sizes were wrong: the content may be wrong too
        damages = discovery.damages(entry.found.path, described, list(described.files))
        return replace(entry, problem=_said(damages) or entry.problem)
    return entry


def _said(damages: list[Damage]) -> str:
    return "; ".join(damage.text for damage in damages)


def _damage(folder: Path, described: Manifest, name: str, progress: Progress) -> list[Damage]:
    digest = hashlib.sha256()
    try:
        for block in reads.blocks(folder / name, BLOCK_BYTES):
            digest.update(block)
            progress.advance(len(block))
    except OSError:
        pass  # described below
    if digest.hexdigest() == described.files[name].sha256:
        return []
    return discovery.damages(folder, described, [name])  # read again to locate the damage
