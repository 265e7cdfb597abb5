"""Devices without generators, as XLA's: what can be drawn on the host is, and what cannot is refused."""

from types import SimpleNamespace

import pytest
import torch

from tr_optim.neftune_noise import seeded
from tr_optim.projection.basis import has_generator, seeded_generator


def test_what_draws_in_every_step_is_refused_on_xla():
    with pytest.raises(ValueError, match=r"NEFTune, stochastic rounding and sketches .* leave them out there"):
        seeded_generator(SimpleNamespace(device=torch.device("xla")), ("a", 1))


def test_noise_is_drawn_on_the_host_for_a_device_without_generators():
    assert not has_generator("meta")
    assert seeded((1, 2), torch.device("meta")).device == torch.device("cpu")
