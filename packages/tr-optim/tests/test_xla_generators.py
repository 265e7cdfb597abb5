"""XLA devices have no generators: what can be drawn on the host is, and what cannot is refused."""

from types import SimpleNamespace

import pytest
import torch

from tr_optim.projection.basis import seeded_generator


def test_what_draws_in_every_step_is_refused_on_xla():
    with pytest.raises(ValueError, match=r"NEFTune, stochastic rounding and sketches .* leave them out there"):
        seeded_generator(SimpleNamespace(device=torch.device("xla")), ("a", 1))
