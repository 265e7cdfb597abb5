import inspect
from dataclasses import fields

import pytest
import torch
from torch import nn

from tr_optim import (
    Adafactor,
    AdaLomo,
    AdamW8bit,
    APOLLOAdamW,
    FiraAdamW,
    GaLoreAdafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    Lomo,
)
from tr_optim.engine.settings import GaLoreOptions, Projection
from tr_optim.options import flag, number, number_pair, optional_number, optional_word, read_options, word

TAKES = {
    "rate": number, "beta": optional_number, "eps": number_pair, "scale": flag, "kind": word, "compat": optional_word,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ("", {}),
        ("rate=1e-3", {"rate": 1e-3}),
        (" rate = 2 , scale=False,", {"rate": 2.0, "scale": False}),
        ("eps=(1e-30, 1e-3),rate=1", {"eps": (1e-30, 1e-3), "rate": 1.0}),
        ("eps=[1,2]", {"eps": (1.0, 2.0)}),
        ("kind='std', eps='(1, 2)', compat=\"x\"", {"kind": "std", "eps": (1.0, 2.0), "compat": "x"}),
        ("kind=none, compat=none", {"kind": "none", "compat": None}),
        ('{"rate": 1, "eps": [1, 2], "beta": null}', {"rate": 1.0, "eps": (1.0, 2.0), "beta": None}),
        ({"beta": "None", "scale": True, "rate": "3"}, {"beta": None, "scale": True, "rate": 3.0}),
    ],
)
def test_options_are_read_from_text_json_and_mappings(given, expected):
    assert read_options(given, TAKES, "test") == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rate", "optim_args='rate' needs name=value parts separated by commas, not 'rate'"),
        ("=3", "needs name=value parts separated by commas, not '=3'"),
        ("{rate: 1}", "needs name=value parts or JSON; as JSON it breaks off at character 2"),
        ("rate=1, rate=2", "needs each name once; rate is there twice"),
        ("kind=1", "kind=1 of test needs a word"),
        ("kind=true", "kind=True of test needs a word"),
        ({"kind": ["a"]}, "kind=.'a'. of test needs a word"),
        ({"compat": 1}, "compat=1 of test needs a word"),
        ("speed=1", "test does not take 'speed'; it takes beta, compat, eps, kind, rate, scale$"),
        ("rat=1", "did you mean rate?"),
        ("rate=fast", "optim_args: rate='fast' of test needs a number"),
        ({"rate": True}, "rate=True of test needs a number"),
        ("beta=x", "beta='x' of test needs a number"),
        ("eps=1", "eps=1 of test needs two numbers, such as"),
        ({"eps": 1}, "eps=1 of test needs two numbers"),
        ({"eps": ["a", 1]}, "of test needs a number"),
        ("scale=1", "scale=1 of test needs true or false"),
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


REFUSED = [
    (AdamW8bit, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be two numbers"),
    (GaLoreAdamW, {"eps": -1.0}, "eps=-1 must not be negative"),
    (AdamW8bit, {"weight_decay": -1.0}, "weight_decay=-1 must not be negative"),
    (AdamW8bit, {"min_8bit_size": -1}, "min_8bit_size=-1 must be a whole number from 0"),
    (AdamW8bit, {"min_8bit_size": 0.5}, "min_8bit_size=0.5 must be a whole number from 0"),
    (GaLoreAdamW8bit, {"min_8bit_size": -1}, "min_8bit_size=-1 must be a whole number from 0"),
    (Adafactor, {"lr": 1e-3}, "lr=0.001 and relative_step=True both set the step size; set relative_step=False"),
    (Adafactor, {"relative_step": False}, "relative_step=False needs a learning rate"),
    (Adafactor, {"lr": 1.0, "relative_step": False, "warmup_init": True}, "warmup_init=True warms up relative steps"),
    (Adafactor, {"eps": (-1.0, 0.0)}, "must be two numbers from 0"),
    (Adafactor, {"beta1": 1.0}, "beta1=1 must be from 0 to below 1"),
    *(
        (kind, options, message)
        for kind in (Adafactor, AdaLomo)
        for options, message in (
            ({"eps": (1e-30,)}, r"eps=\(1e-30,\) must be two numbers from 0"),
            ({"clip_threshold": 0.0}, "clip_threshold=0 must be positive"),
            ({"decay_rate": 0.8}, "decay_rate=0.8 must be negative"),
        )
    ),
    *((kind, {"weight_decay": -0.1}, r"weight_decay=-0\.1 must not be negative") for kind in (Lomo, AdaLomo)),
    (AdaLomo, {"clip_grad_norm": -1.0}, "clip_grad_norm=-1 must be positive"),
    (Lomo, {"clip_grad_norm": 0.0}, "clip_grad_norm=0 must be positive, or None for no clipping"),
    (Lomo, {"clip_grad_value": -2.0}, "clip_grad_value=-2 must be positive"),
    (Lomo, {"clip_grad_norm": 1.0, "clip_grad_value": 2.0}, "clip_grad_norm=1 and clip_grad_value=2 are both set"),
    (Lomo, {"accumulate": "keep"}, "accumulate='keep' is not known; choose refuse or store"),
    (Lomo, {"nonfinite": "raise"}, "nonfinite='raise' is not known; choose skip_tensor or skip_step"),
]
LAZY = {"refresh": "lazy"}
REFUSED_OF_PROJECTIONS = [
    (GaLoreAdamW, {"rank": 0}, "rank=0 must be a whole number from 1"),
    (GaLoreAdamW, {"rank": 4.0}, "rank=4.0 must be a whole number from 1"),
    (GaLoreAdamW, {"update_proj_gap": 0}, "update_proj_gap=0 must be a whole number from 1"),
    (GaLoreAdamW, {"scale": 0.0}, "scale=0 must be positive"),
    (GaLoreAdamW, {"proj_type": "up"}, "proj_type='up' is not known; it is one of std, reverse_std, right, left, full"),
    (GaLoreAdamW, {"mode": "layerwise"}, "mode='layerwise' is not known; it is one of step, deferred, immediate"),
    (GaLoreAdamW, {"method": "qr"}, "method='qr' is not known; it is one of subspace, svd"),
    (GaLoreAdamW, {"reduction": "none"}, "reduction='none' is not known; it is one of projected, whole"),
    (GaLoreAdamW, {"refresh_from": "last"}, "refresh_from='last' is not known; it is one of all, first"),
    (GaLoreAdamW, {"compat": "galore"}, "compat='galore' is not known; it is one of None, galore-torch"),
    (GaLoreAdamW, {"exchange_dtype": "float16"}, "exchange_dtype='float16' is not known; it is one of float32, bf"),
    (GaLoreAdamW, {"refresh_from": "all_but_first"}, "refresh_from='all_but_first' is not known; it is one of all, f"),
    (GaLoreAdamW, {"basis_dtype": "fp8"}, "basis_dtype='fp8' is not known; it is one of float32, bfloat16, int8, int4"),
    (GaLoreAdamW, {"refresh": "lasy"}, "refresh='lasy' is not known; it is one of fixed, lazy"),
    (GaLoreAdamW, {**LAZY, "refresh_cosine": 0.0}, "refresh_cosine=0 must be above 0 and at most 1"),
    (GaLoreAdamW, {**LAZY, "refresh_window": 0}, "refresh_window=0 must be a whole number from 1"),
    (GaLoreAdamW, {"refresh_cosine": 0.5}, "refresh_cosine=0.5 and refresh_window=5 are of refresh='lazy', and ref"),
    *(
        (GaLoreAdamW, {**options, "compat": "galore-torch"}, "compat='galore-torch' has a fixed schedule and float32")
        for options in (LAZY, {"basis_dtype": "int8"})
    ),
    *(
        (kind, options, message)
        for kind in (APOLLOAdamW, FiraAdamW)
        for options, message in (
            ({"proj_type": "full"}, "proj_type='full' leaves no rows or columns to scale; use std, reverse_std"),
            ({"norm_growth": 0.9}, "norm_growth=0.9 must be at least 1, or None for no limit"),
            ({"mode": "deferred"}, "needs the gradients themselves; use mode='immediate', .* or mode='step'"),
        )
    ),
    (APOLLOAdamW, {"proj": "normal"}, "proj='normal' is not known; it is one of random, svd, subspace"),
    (APOLLOAdamW, {"scale_type": "row"}, "scale_type='row' is not known; it is one of channel, tensor"),
    (APOLLOAdamW, {"mode": "layerwise"}, "mode='layerwise' is not known; it is one of step, immediate"),
    (APOLLOAdamW, {"compat": "fira"}, "compat='fira' is not known; it is one of None, apollo-torch"),
    (FiraAdamW, {"method": "qr"}, "method='qr' is not known; it is one of subspace, svd"),
    (FiraAdamW, {"compat": "galore-torch"}, "compat='galore-torch' is not known; it is one of None, fira"),
]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [*REFUSED, *((kind, {"rank": 2, **options}, message) for kind, options, message in REFUSED_OF_PROJECTIONS)],
)
def test_arguments_out_of_range_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind([nn.Parameter(torch.zeros(4, 6))], **options)
