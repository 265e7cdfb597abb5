"""Measure what it costs to find a basis: when it is refreshed, and for all matrices of a large model at the start.

Beside it is galore-torch's own projector, which takes all singular vectors. Times are the processor's, of one thread,
in turn; read the ratios. A gradient is made of factors whose strength falls off as i^-0.5, and of noise; the old basis
is the best one of a gradient whose factors have drifted apart from these by 0.3.

Run: python projection.py [--rounds 5] [--without-upstream]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from contestants import galore_torch_module, write_json
from torch.utils.flop_counter import FlopCounterMode

from tr_optim.projection.basis import Basis, find_basis

GOAL_RATIO, GOAL_ENERGY = 15, 0.99
SHAPES = ((512, 512, 128), (1024, 4096, 256), (2048, 2048, 512))
# Of Gemma 2B: 18 layers, each with these; names as in its configuration.
GEMMA_2B = {
    "q_proj, o_proj": ((2048, 2048), 2 * 18),
    "k_proj, v_proj": ((256, 2048), 2 * 18),
    "gate_proj, up_proj": ((16384, 2048), 2 * 18),
    "down_proj": ((2048, 16384), 18),
}


def drifted(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two gradients of one shape, of which the second is the first, some steps later."""
    count = min(rows, columns)
    strength = torch.arange(1, count + 1).float().pow(-0.5)
    left, right = torch.randn(rows, count) / rows**0.5, torch.randn(count, columns) / columns**0.5

    def made(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        clean = (left * strength) @ right
        noise = torch.randn(rows, columns)
        return clean + noise * (0.1 * clean.norm() / noise.norm())

    share = (1 - 0.3**2) ** 0.5
    later = (
        share * left + 0.3 * torch.randn_like(left) / rows**0.5,
        share * right + 0.3 * torch.randn_like(right) / columns**0.5,
    )
    return made(left, right), made(*later)


def best(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the best left basis: the first eigenvectors, found in float64."""
    wide = gradient.double()
    return torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -rank:].float()


def energy(gradient: torch.Tensor, columns: torch.Tensor) -> float:
    """Return the share of a gradient's squared norm that a left basis holds."""
    return ((columns.double().T @ gradient.double()).square().sum() / gradient.double().square().sum()).item()


def cpu_s(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


@dataclass
class Way:
    """One way to find a left basis."""

    find: Callable[[], torch.Tensor]
    times: list[float]


def ways(gradient: torch.Tensor, old: torch.Tensor, rank: int, *, upstream: bool) -> dict[str, Way]:
    def ours(before: torch.Tensor | None, method: str = "subspace") -> Callable[[], torch.Tensor]:
        basis = None if before is None else Basis(before, None)

        def find() -> torch.Tensor:
            found = find_basis(gradient, rank, "left", basis, method=method).left
            assert found is not None
            return found

        return find

    found = {}
    if upstream:
        projector = galore_torch_module("galore_projector").GaLoreProjector(rank)
        found["galore-torch, full SVD"] = Way(lambda: projector.get_orthogonal_matrix(gradient, rank, "left"), [])
    found["method=svd, full SVD"] = Way(ours(None, "svd"), [])
    found["from nothing (first step)"] = Way(ours(None), [])
    found["warm (each refresh)"] = Way(ours(old), [])
    return found


def refreshes(
    rounds: int, shapes: tuple[tuple[int, int, int], ...], *, upstream: bool
) -> dict[str, dict[str, dict[str, float]]]:
    results: dict[str, dict[str, dict[str, float]]] = {}
    print("A basis of one matrix. Energy: what it holds of the gradient's, as a share of the most that is possible.\n")
    for rows, columns, rank in shapes:
        torch.manual_seed(0)
        before, gradient = drifted(rows, columns)
        old, most = best(before, rank), energy(gradient, best(gradient, rank))
        found = ways(gradient, old, rank, upstream=upstream)
        for _ in range(rounds):
            for way in found.values():
                way.times.append(cpu_s(way.find))
        full = next(iter(found.values())).times
        kept = _share(gradient, old, most)
        print(f"{rows} x {columns}, rank {rank}; the best basis holds {most:.3f}, and the old one {kept} of that")
        for name, way in found.items():
            ratios = [slow / quick for slow, quick in zip(full, way.times, strict=True)]
            share = energy(gradient, way.find()) / most
            results.setdefault(f"{rows} x {columns}, rank {rank}", {})[name] = {
                "cpu_s": statistics.median(way.times),
                "times_cheaper": statistics.median(ratios),
                "energy": share,
            }
            print(
                f"  {name:28}{statistics.median(way.times) * 1e3:9.1f} ms {statistics.median(ratios):7.1f} times "
                f"cheaper ({min(ratios):.1f} - {max(ratios):.1f})   energy {share:.4f}",
                flush=True,
            )
    print(f"\nThe goal at 1024 x 4096: warm at least {GOAL_RATIO} times cheaper, with energy {GOAL_ENERGY} at least.\n")
    return results


def _share(gradient: torch.Tensor, columns: torch.Tensor, most: float) -> str:
    return f"{energy(gradient, columns) / most:.4f}"


def operations(shape: tuple[int, int], rank: int) -> int:
    """Return the floating-point operations in the matrix products of a first basis, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        find_basis(torch.empty(shape, device="meta"), rank, "std")
    return counter.get_total_flops()


def start_up(rank: int, scale: int) -> None:
    """Print what the first bases of Gemma 2B cost.

    Args:
        rank: of the projections.
        scale: divides the shapes, to try this.
    """
    shapes = {name: ((m // scale, n // scale), count) for name, ((m, n), count) in GEMMA_2B.items()}
    matrices = sum(count for _, count in shapes.values())
    print(
        f"Start: the first bases of Gemma 2B's {matrices} matrices, rank {rank}. One of each shape is measured; the\n"
        "sums, marked with ~, are its times and their number. Operations are those of matrix products.\n"
    )
    print(f"  {'':22}{'shape':>14}{'number':>8}{'operations':>13}{'ours':>10}{'full SVD':>11}")
    totals = [0.0, 0.0, 0.0]
    for name, (shape, count) in shapes.items():
        torch.manual_seed(0)
        gradient = drifted(*shape)[1]
        counted = operations(shape, rank)
        ours = cpu_s(lambda gradient=gradient: find_basis(gradient, rank, "std"))
        full = cpu_s(lambda gradient=gradient: torch.linalg.svd(gradient, full_matrices=False))
        print(
            f"  {name:22}{f'{shape[0]} x {shape[1]}':>14}{count:>8}{counted / 1e9:>10.1f} G {ours:8.2f} s{full:9.2f} s",
            flush=True,
        )
        totals = [total + count * one for total, one in zip(totals, (counted, ours, full), strict=True)]
    print(
        f"  {'all':36}{matrices:>8}{totals[0] / 1e12:>10.2f} T {'~':>2}{totals[1]:6.0f} s{'~':>3}{totals[2]:6.0f} s   "
        f"{totals[2] / totals[1]:.0f} times as long"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="times that each basis is found (default 5)")
    parser.add_argument("--rank", type=int, default=128, help="at the start (default 128)")
    parser.add_argument("--without-upstream", action="store_true", help="without galore-torch")
    parser.add_argument("--small", action="store_true", help="small shapes, to try this script")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    upstream = not options.without_upstream
    found = refreshes(options.rounds, ((64, 96, 16),) if options.small else SHAPES, upstream=upstream)
    write_json(options.json, {"goal_times_cheaper": GOAL_RATIO, "goal_energy": GOAL_ENERGY, "bases": found})
    start_up(8 if options.small else options.rank, 64 if options.small else 1)


if __name__ == "__main__":
    main()
