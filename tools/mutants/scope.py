"""Say which files are mutated: those that decide a number, an order, a digest or what an argument means."""

from __future__ import annotations

from pathlib import Path

from packages import ROOT, package

# Patterns below a package's source folder.
SCOPE = {
    "tr-core": (
        "loop.py",
        "making_up.py",
        "metric_window.py",
        "randomness.py",
        "scalars.py",
        "state.py",
        "stepping.py",
        "steps.py",
        "tokens.py",
        "window.py",
        "collators/*.py",
        "data/batches.py",
        "data/fetch.py",
        "data/first_batches.py",
        "data/length_grouping.py",
        "data/*order.py",
        "data/place.py",
        "evaluation/best.py",
        "evaluation/collected.py",
        "evaluation/evaluation_lo*.py",
        "evaluation/evaluation_weights.py",
        "evaluation/rows.py",
        "evaluation/streaming.py",
        "losses/*.py",
        "optimization/*.py",
        "resuming/groups.py",
        "resuming/schedule.py",
    ),
    "tr-optim": (
        "ada*.py",
        "apollo.py",
        "fira.py",
        "galore*.py",
        "groups.py",
        "lomo.py",
        "neftune_*s*.py",
        "engine/a[pv]*.py",
        "engine/norm*.py",
        "engine/projected.py",
        "engine/random_bases.py",
        "engine/r[eo]*.py",
        "engine/loss_scaling.py",
        "engine/sketches.py",
        "moments/*.py",
        "projection/*.py",
    ),
    "tr-ckpt": (
        "catalogue.py",
        "files.py",
        "leaves.py",
        "manifest.py",
        "rank_records.py",
        "retention.py",
        "rng_state.py",
        "tensor_file.py",
        "tree.py",
        "sharded/named_state.py",
        "sharded/planning.py",
        "sharded/shard_index.py",
    ),
    "tr-args": (
        "constraints.py",
        "conversion.py",
        "derivations.py",
        "duration.py",
        "rules.py",
        "switch_or_count.py",
        "token_counting.py",
        "topology.py",
    ),
}


def mutated_files(name: str) -> list[Path]:
    """Return the files of package `name` that are mutated, relative to the repository.

    Raises:
        ValueError: a pattern matches no file, after a file was renamed perhaps.
    """
    source = package(name).source
    found: set[Path] = set()
    for pattern in SCOPE[name]:
        matched = [path for path in source.glob(pattern) if path.name != "__init__.py"]
        if not matched:
            raise ValueError(f"{name}: no file matches {pattern!r}; change SCOPE in tools/mutants/scope.py")
        found.update(matched)
    return sorted(path.relative_to(ROOT) for path in found)
