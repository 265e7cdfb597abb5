"""Say which files are mutated: those that decide a number, an order, a digest or what an argument means."""

from __future__ import annotations

from pathlib import Path

from packages import ROOT, package

# Patterns below a package's source folder.
SCOPE = {
    "tr-core": (
        "log_window.py",
        "loop.py",
        "loss.py",
        "metric_means.py",
        "plan.py",
        "random_state.py",
        "rollback.py",
        "state.py",
        "trainer/loss_methods.py",
        "checkpoint/optimizer_groups.py",
        "checkpoint/schedule_state.py",
        "collators/*.py",
        "data/batches.py",
        "data/fetch.py",
        "data/length_grouping.py",
        "data/limits.py",
        "data/sampler.py",
        "evaluation/best_metric.py",
        "evaluation/evaluation_loop.py",
        "evaluation/metrics.py",
        "evaluation/output_buffer.py",
        "callbacks/evaluation_weights.py",
        "optim/*.py",
    ),
    "tr-optim": (
        "ada*.py",
        "apollo.py",
        "fira.py",
        "galore*.py",
        "groups.py",
        "lomo.py",
        "neftune*.py",
        "engine/averaging.py",
        "engine/backward_norms.py",
        "engine/bases.py",
        "engine/norm_growth.py",
        "engine/precision.py",
        "engine/projected.py",
        "engine/updates.py",
        "moments/*.py",
        "projection/*.py",
    ),
    "tr-ckpt": (
        "codec.py",
        "discovery.py",
        "files.py",
        "manifest.py",
        "rank_records.py",
        "retention.py",
        "rng_state.py",
        "tensor_file.py",
        "sharded/*.py",
    ),
    "tr-args": (
        "constraints.py",
        "conversion.py",
        "rules.py",
        "process.py",
        "types/*.py",
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
