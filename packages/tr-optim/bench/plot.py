"""Draw the validation losses that `quality.py` has kept, and print them as a table.

Of each optimizer that learning rate counts which was best with seed 0; curves are means over the seeds, and each seed's
end is a dot. Needs matplotlib.

Run: python plot.py [--output results/quality.svg]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from contestants import write_json
from quality import RESULTS, read_results

# Names of the runs, in the order in which they are shown, with the colours of Okabe and Ito, which all can tell apart.
LABELS = {
    "adamw": ("AdamW", "#000000"),
    "galore_adamw:compat=galore-torch": ("GaLore, full SVD as galore-torch", "#D55E00"),
    "galore_adamw:method=svd": ("GaLore, full SVD, moments rotated", "#E69F00"),
    "galore_adamw": ("GaLore, warm refresh (default)", "#0072B2"),
    "apollo_adamw": ("APOLLO", "#009E73"),
    "apollo_mini": ("APOLLO-Mini", "#56B4E9"),
    "fira_adamw": ("Fira", "#CC79A7"),
}
FULL_SVD, WARM, MOST_APART = ("galore_adamw:compat=galore-torch", "galore_adamw:method=svd"), "galore_adamw", 0.005


def chosen(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each optimizer at its best learning rate, by seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    names = {result["optimizer"] for result in results}
    order = [*(name for name in LABELS if name in names), *sorted(names - LABELS.keys())]
    for name in order:
        own = [result for result in results if result["optimizer"] == name]
        first = min((result for result in own if result["seed"] == 0), key=lambda result: result["validation_loss"])
        at_best = [result for result in own if result["lr"] == first["lr"]]
        found[name] = sorted(at_best, key=lambda result: result["seed"])
    return found


def mean_loss(runs: list[dict[str, Any]]) -> float:
    return statistics.mean(run["validation_loss"] for run in runs)


def print_table(results: list[dict[str, Any]], found: dict[str, list[dict[str, Any]]]) -> None:
    full = [mean_loss(found[name]) for name in FULL_SVD if name in found]
    base = min(full) if full else None
    print(f"{'':36}{'lr':>8}  {'of':30}{'mean':>8}{'to full SVD':>13}   of seeds")
    for name, runs in found.items():
        tried = ", ".join(f"{lr:g}" for lr in sorted({r["lr"] for r in results if r["optimizer"] == name}))
        apart = "" if base is None else f"{mean_loss(runs) / base - 1:+.2%}"
        seeds = ", ".join(f"{run['seed']}: {run['validation_loss']:.4f}" for run in runs)
        label = LABELS.get(name, (name, ""))[0]
        print(f"{label:36}{runs[0]['lr']:>8g}  {tried:30}{mean_loss(runs):8.4f}{apart:>13}   {seeds}")
    if base is not None and WARM in found:
        is_held = mean_loss(found[WARM]) <= base * (1 + MOST_APART)
        print(f"\nwarm refresh is {'' if is_held else 'not '}within {MOST_APART:.1%} of the better full SVD")


def draw(found: dict[str, list[dict[str, Any]]], output: Path) -> None:
    import matplotlib

    matplotlib.use("svg" if output.suffix == ".svg" else "agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tr-optim", "font.size": 9})
    from matplotlib import pyplot

    figure, (curves, ends) = pyplot.subplots(1, 2, figsize=(9.6, 4.2), width_ratios=(3, 2), layout="constrained")
    settings = next(iter(found.values()))[0]["settings"]
    for place, (name, runs) in enumerate(found.items()):
        label, colour = LABELS.get(name, (name, "#999999"))
        steps = [int(step) for step in runs[0]["curve"] if all(step in run["curve"] for run in runs)]
        means = [statistics.mean(run["curve"][str(step)] for run in runs) for step in steps]
        curves.plot(steps, means, label=f"{label}, lr {runs[0]['lr']:g}", color=colour, linewidth=1.3)
        losses = [run["validation_loss"] for run in runs]
        ends.plot(losses, [place] * len(losses), "o", color=colour, markersize=4)
        ends.plot([statistics.mean(losses)], [place], "|", color=colour, markersize=16, markeredgewidth=1.6)
    curves.set(xlabel="step", ylabel="validation loss, nats per byte", yscale="log", title="means over the seeds")
    curves.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    curves.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    curves.grid(alpha=0.25, which="both")
    curves.legend(fontsize=7.5)
    ends.set(
        yticks=range(len(found)), xlabel="validation loss at the end, nats per byte", title="each seed, and the mean"
    )
    ends.set_yticklabels([LABELS.get(name, (name, ""))[0].replace(", ", ",\n") for name in found], fontsize=7.5)
    ends.invert_yaxis()
    ends.grid(alpha=0.25, axis="x")
    figure.suptitle(
        f"{settings['layers']} layers of {settings['width']}, World English Bible, {settings['steps']} steps of "
        f"{settings['batch']} x {settings['length']} bytes, rank {settings['rank']}, gap {settings['gap']}"
    )
    metadata = {"Date": None} if output.suffix == ".svg" else {}
    figure.savefig(output, metadata=metadata, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=RESULTS.with_suffix(".svg"))
    parser.add_argument("--table-only", action="store_true", help="draw nothing")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    results = read_results(options.results)
    found = chosen(results)
    print_table(results, found)
    rows = {
        name: {"lr": runs[0]["lr"], "mean": mean_loss(runs), "losses": [run["validation_loss"] for run in runs]}
        for name, runs in found.items()
    }
    write_json(options.json, {"most_apart": MOST_APART, "losses": rows})
    if not options.table_only:
        draw(found, options.output)


if __name__ == "__main__":
    main()
