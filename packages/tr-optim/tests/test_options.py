import inspect
from dataclasses import fields

import pytest
import torch
from torch import nn

from tr_optim import APOLLOAdamW, FiraAdamW, GaLoreAdafactor, GaLoreAdamW
from tr_optim.engine.settings import GaLoreOptions, Projection
from tr_optim.options import flag, number, number_pair, optional_number, read_options

TAKES = {"rate": number, "beta": optional_number, "eps": number_pair, "scale": flag}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ("", {}),
        ("rate=1e-3", {"rate": 1e-3}),
        (" rate = 2 , scale=False,", {"rate": 2.0, "scale": False}),
        ("eps=(1e-30, 1e-3),rate=1", {"eps": (1e-30, 1e-3), "rate": 1.0}),
        ("eps=[1,2]", {"eps": (1.0, 2.0)}),
        ('{"rate": 1, "eps": [1, 2], "beta": null}', {"rate": 1.0, "eps": (1.0, 2.0), "beta": None}),
        ({"beta": "None", "scale": True, "rate": "3"}, {"beta": None, "scale": True, "rate": 3.0}),
    ],
)
def test_options_are_read_from_text_json_and_mappings(given, expected):
    assert read_options(given, TAKES, "test") == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rate", "optim_args='rate' cannot be read at 'rate'; write name=value"),
        ("=3", "cannot be read at '=3'"),
        ("{rate: 1}", "is not JSON"),
        ("speed=1", "test does not take 'speed'; it takes beta, eps, rate, scale$"),
        ("rat=1", "did you mean rate?"),
        ("rate=fast", "optim_args: rate='fast' of test needs a number"),
        ({"rate": True}, "rate=True of test needs a number"),
        ("beta=x", "beta='x' of test needs a number"),
        ("eps=1", "eps='1' of test needs two numbers, such as"),
        ({"eps": 1}, "eps=1 of test needs two numbers"),
        ({"eps": ["a", 1]}, "of test needs a number"),
        ("scale=1", "scale='1' of test needs true or false"),
    ],
)
def test_options_that_cannot_be_used_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        read_options(given, TAKES, "test")


@pytest.mark.parametrize("kind", [GaLoreAdamW, GaLoreAdafactor, APOLLOAdamW, FiraAdamW])
def test_the_arguments_of_a_projection_are_in_the_signature_with_their_defaults_and_others_are_refused(kind):
    defaults = {field.name: field.default for field in fields(Projection)}
    assert set(GaLoreOptions.__optional_keys__) == set(defaults)
    shown = inspect.signature(kind).parameters
    taken = [name for name in defaults if name in shown]
    assert {"rank", "update_proj_gap", "scale", "proj_type", "mode", "seed", "compat"} <= set(taken)
    assert all(shown[name].default == defaults[name] for name in taken if name != "scale")
    for name in ("unheard_of", *(defaults.keys() - taken)):
        with pytest.raises(
            TypeError, match=rf"{kind.__name__}.__init__\(\) got an unexpected keyword argument '{name}'"
        ):
            kind([nn.Parameter(torch.ones(4, 6))], **{name: 1})
