"""Divide sequences over processes, of any number of heads: attention is that of a piece to the whole sequence."""

from __future__ import annotations

import torch
from torch import nn

from tr_dist.mesh.attention import Exchange, attentions_of
from tr_dist.mesh.sequence import Sequences

_KNOWN = {"eager", "sdpa"}


class Context(Sequences):
    """Processes that have a piece of each sequence; in attention each has its queries, and the keys and values of all.

    Heads are not shared out, so their number is no limit. Masks are explicit, so that each piece costs the same, as it
    follows the one before.

    Source: Llama Team 2024, arXiv:2407.21783, section 3.3.2, whose pieces are of the beginning and of the end.

    Args:
        size: number of processes.
        label_names: see `Sequences`.
    """

    name = "cp"
    shares_heads = False

    @property
    def queries(self) -> tuple[int, int]:
        """Return the first position whose attention this process computes, and their number."""
        return self.rank * self.division.piece, self.division.piece

    def check(self, model: nn.Module) -> None:
        """Check the sizes, and that attention takes a mask; see `Direction.check`."""
        super().check(model)
        if others := attentions_of(model) - _KNOWN:
            raise ValueError(
                f"{self.asked} needs attention that takes a mask, and that of {type(model).__name__} is "
                f"{', '.join(sorted(others))}; set attn_implementation='sdpa', or use sp_size"
            )

    def enter(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the queries, and keys and values of whole sequences: `(batch, heads, length, size)`."""
        query, *others = states
        return [query, *(Exchange.apply(each.repeat(1, self.size, 1, 1), self.group, 1, 2) for each in others)]

    def leave(self, output: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the output as it is: a piece of all heads."""
        return output

    def whole_mask(self, mask: torch.Tensor | None, *, is_causal: bool, device: torch.device) -> torch.Tensor | None:
        """Return the mask of a piece's queries, from the one that a module made; see `Sequences.whole_mask`."""
        if not is_causal:
            return super().whole_mask(mask, is_causal=False, device=device)
        first, number = self.queries
        return torch.ones(number, self.size * number, dtype=torch.bool, device=device).tril(first)
