"""Rules give some parameters a learning rate, a weight decay and optimizer options of their own."""

import pytest
import torch
from support.models import Classifier
from torch import nn

from tr_core import Trainer, TrainerCallback
from tr_core.optim.parameter_rules import read_rules


class Encoder(nn.Module):
    """Two layers and a norm below, a head above."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"first": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "second": nn.Linear(8, 8)})
        self.head = nn.Linear(8, 3)

    def forward(self, x, labels=None):
        hidden = self.encoder["second"](self.encoder["norm"](self.encoder["first"](x)))
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def groups_of(trainer):
    """The names of the parameters of every group, and what the group has for them."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    return [
        ([names[id(parameter)] for parameter in group["params"]], {k: v for k, v in group.items() if k != "params"})
        for group in trainer.create_optimizer().param_groups
    ]


def named(trainer, rule):
    return [(members, group) for members, group in groups_of(trainer) if group.get("rule") == rule]


def test_a_rule_divides_its_parameters_by_the_decay_rule_and_the_rest_stays_in_the_first_groups(make_trainer):
    rules = [{"params": "encoder", "lr_scale": 0.1}]
    trainer = make_trainer(model=Encoder(), parameter_rules=rules, weight_decay=0.2, learning_rate=1e-2)
    found = groups_of(trainer)
    assert [members for members, _ in found] == [
        ["head.weight"],
        ["head.bias"],
        ["encoder.first.weight", "encoder.second.weight"],
        ["encoder.first.bias", "encoder.norm.weight", "encoder.norm.bias", "encoder.second.bias"],
    ]
    assert [group["weight_decay"] for _, group in found] == [0.2, 0.0, 0.2, 0.0]
    assert [group["lr"] for _, group in found] == [1e-2, 1e-2, pytest.approx(1e-3), pytest.approx(1e-3)]


def test_the_weight_decay_of_a_rule_is_for_all_its_parameters_and_its_rate_and_scale_are_multiplied(make_trainer):
    rules = [{"params": "encoder\\..*", "learning_rate": 1e-5, "weight_decay": 0.3, "lr_scale": 0.1}]
    trainer = make_trainer(model=Encoder(), parameter_rules=rules, weight_decay=0.2)
    ((members, group),) = named(trainer, "encoder")
    assert len(members) == 6
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(1e-6), 0.3)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ("first", ["encoder.first.weight", "encoder.first.bias"]),
        ("encoder.f", ["encoder.first.weight", "encoder.first.bias"]),
        (r"encoder\.(first|second)\.weight", ["encoder.first.weight", "encoder.second.weight"]),
        (r"(first|second)\.weight", None),
        (["head.bias", r".*norm\.weight"], ["encoder.norm.weight", "head.bias"]),
    ],
)
def test_a_pattern_is_part_of_a_name_or_matches_the_whole_name(make_trainer, params, names):
    trainer = make_trainer(model=Encoder(), parameter_rules=[{"params": params, "name": "mine", "learning_rate": 1}])
    if names is None:
        with pytest.raises(ValueError, match="matches no parameter"):
            trainer.create_optimizer()
        return
    assert sorted(name for members, _ in named(trainer, "mine") for name in members) == sorted(names)


def test_the_first_rule_that_matches_counts(make_trainer):
    rules = [{"params": "encoder.first", "learning_rate": 1.0}, {"params": "encoder", "learning_rate": 2.0}]
    trainer = make_trainer(model=Encoder(), parameter_rules=rules)
    rate_of = {name: group["lr"] for members, group in groups_of(trainer) for name in members}
    assert rate_of["encoder.first.weight"] == 1.0
    assert rate_of["encoder.second.weight"] == 2.0


def test_frozen_parameters_are_left_out(make_trainer):
    model = Encoder()
    model.encoder["first"].requires_grad_(False)
    trainer = make_trainer(model=model, parameter_rules=[{"params": "encoder", "lr_scale": 0.5}])
    members = [name for names, _ in groups_of(trainer) for name in names]
    assert not any("first" in name for name in members)
    assert len(members) == 6


def test_other_keys_are_options_of_the_optimizer_with_its_types(make_trainer):
    rules = [{"params": "head", "betas": [0.5, "0.6"], "eps": "1e-3"}]
    for _, group in named(make_trainer(model=Encoder(), parameter_rules=rules, optim="adamw_torch"), "head"):
        assert (group["betas"], group["eps"]) == ((0.5, 0.6), 1e-3)


def test_parameters_of_a_rule_are_trained_as_it_says(make_trainer):
    """A rate of 0 keeps them as they are; momentum of its own makes another step than the others'."""
    model = Encoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rules = [{"params": "encoder", "learning_rate": 0.0}]
    make_trainer(model=model, parameter_rules=rules, learning_rate=0.1, weight_decay=0.5).train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("encoder"), name


def test_a_schedule_multiplies_the_rate_of_every_group(make_trained):
    seen = []

    class Watching(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            seen.append([group["lr"] for group in kwargs["optimizer"].param_groups])

    rules = [{"params": "encoder", "lr_scale": 0.1}]
    make_trained(model=Encoder(), parameter_rules=rules, learning_rate=1.0, callbacks=[Watching()])
    assert [rates[0] for rates in seen] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert [rates[2] for rates in seen] == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])


def test_the_rates_of_rules_are_logged_beside_the_common_one(make_trained, tmp_path):
    rules = [
        {"params": "encoder.first", "lr_scale": 0.1},
        {"params": ["encoder"], "name": "rest", "lr_scale": 0.2},
        {"params": r"(head\.bias)", "lr_scale": 0.3},
        {"params": "head", "lr_scale": 0.4},
    ]
    trainer = make_trained(model=Encoder(), parameter_rules=rules, learning_rate=1.0, max_steps=2)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = ["encoder.first", "rest", "head.bias", "head"]
    for entry, factor in zip(entries, (1.0, 0.5), strict=True):
        expected = {f"learning_rate/{name}": factor * tenths / 10 for tenths, name in enumerate(names, start=1)}
        assert {name: entry[name] for name in expected} == pytest.approx(expected)
        assert entry["learning_rate"] == factor
    assert "learning_rate/rest" in (tmp_path / "out" / "metrics.jsonl").read_text()


def test_without_rules_nothing_more_is_logged_or_called(make_trainer):
    trainer = make_trainer()
    assert not any("RuleRates" in type(callback).__name__ for callback in trainer.callback_handler.callbacks)
    trainer.train()
    assert not any("/" in name for entry in trainer.state.log_history for name in entry)


def test_names_of_rules_that_would_be_alike_are_numbered():
    rules = read_rules(
        [
            {"params": "a", "lr_scale": 1},
            {"params": "(a)", "lr_scale": 1},
            {"params": ".*", "lr_scale": 1},
            {"params": "b", "name": "c", "lr_scale": 1},
            {"params": "c", "lr_scale": 1},
        ],
        1.0,
    )
    assert [rule.name for rule in rules] == ["a", "rule_2", "rule_3", "c", "rule_5"]
    rules = read_rules([{"params": "c", "lr_scale": 1}, {"params": "b", "name": "c", "lr_scale": 1}], 1.0)
    assert [rule.name for rule in rules] == ["rule_1", "c"]  # a name that is given goes first, wherever it stands


def tied():
    model = Encoder()
    model.other = nn.Linear(8, 3)
    model.other.weight = model.head.weight
    return model


def frozen():
    model = Encoder()
    model.encoder.requires_grad_(False)
    return model


CASES = {
    "near name": (
        {"params": "encodr.frst.weight", "lr_scale": 1},
        r"rule 1 of parameter_rules \(params='encodr.frst.weight'\): 'encodr.frst.weight' matches no parameter; near "
        "it are encoder.first.weight",
    ),
    "nothing near": ({"params": "zzz", "lr_scale": 1}, "'zzz' matches no parameter; there are encoder.first.weight, "),
    "no expression": ({"params": "*.bias", "lr_scale": 1}, r"and is not a regular expression \(nothing to repeat"),
    "second pattern": ({"params": ["head", "haed"], "lr_scale": 1}, "'haed' matches no parameter; near it are head"),
    "tied": ({"params": "other.weight", "lr_scale": 1}, "other.weight is the same tensor as head.weight; give that"),
    "frozen": ({"params": "encoder", "lr_scale": 1}, "matches only frozen parameters; it would have no effect"),
    "misspelt key": (
        {"params": "head", "weight_deacy": 1},
        "sets weight_deacy, which AdamW does not take; did you mean weight_decay.; a rule has .*betas",
    ),
    "key of another": ({"params": "head", "momentum": 0.9}, "sets momentum, which AdamW does not take; a rule has"),
    "lr": ({"params": "head", "lr": 1}, "sets lr; write learning_rate, or lr_scale for a share of the common one"),
    "wrong type": ({"params": "head", "eps": "small"}, "eps='small' is not what AdamW takes; its default is 1e-08"),
    "wrong kind": ({"params": "head", "betas": 0.9}, "betas=0.9 is not what AdamW takes; its default is"),
    "truth value": ({"params": "head", "eps": True}, "eps=True is not what AdamW takes; its default is 1e-08"),
    "out of range": ({"params": "head", "betas": [1.5, 0.9]}, "AdamW does not take .*: Invalid beta parameter"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_that_cannot_act_is_refused(make_trainer, case):
    rule, message = CASES[case]
    model = {"tied": tied, "frozen": frozen}.get(case, Encoder)()
    with pytest.raises(ValueError, match=message):
        make_trainer(model=model, parameter_rules=[rule], optim="adamw_torch").train()


def test_a_rule_whose_parameters_earlier_rules_take_is_refused(make_trainer):
    rules = [{"params": "encoder", "lr_scale": 1}, {"params": "first", "lr_scale": 2}]
    with pytest.raises(ValueError, match="rule 2 .* matches only parameters that earlier rules take; put it before"):
        make_trainer(model=Encoder(), parameter_rules=rules).create_optimizer()


def test_rules_have_no_effect_on_an_optimizer_that_is_given_and_are_refused(make_trainer):
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="parameter_rules has no effect on an optimizer that is given"):
        make_trainer(model=model, optimizers=(optimizer, None), parameter_rules=[{"params": "head", "lr_scale": 1}])


def test_rules_that_an_override_passes_over_are_refused(make_trainer):
    class Own(Trainer):
        def create_optimizer(self):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    trainer = make_trainer(trainer_class=Own, model=Encoder(), parameter_rules=[{"params": "head", "lr_scale": 1}])
    with pytest.raises(ValueError, match="has no effect: SGD was built without its parameter groups"):
        trainer.train()


def test_an_override_that_calls_the_original_keeps_the_rules(make_trained):
    class Own(Trainer):
        def create_optimizer(self):
            optimizer = super().create_optimizer()
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
            return optimizer

    trainer = make_trained(trainer_class=Own, model=Encoder(), parameter_rules=[{"params": "head", "lr_scale": 0.5}])
    assert "learning_rate/head" in trainer.state.log_history[0]


def test_a_saved_state_of_other_rules_is_refused_though_its_shapes_fit(make_trainer):
    def optimizer(rules):
        options = {"optim": "sgd", "optim_args": "momentum=0.9", "weight_decay": 0.0}
        return make_trainer(model=Encoder(), parameter_rules=rules, **options).create_optimizer()

    first = [{"params": "encoder.first", "lr_scale": 0.1}]
    second = [{"params": "encoder.second", "lr_scale": 0.1}]
    saved = optimizer(first).state_dict()
    optimizer(first).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"of the parameter groups .*encoder.first \(1\).* now make .*encoder.second"):
        optimizer(second).load_state_dict(saved)
    with pytest.raises(ValueError, match="resume with the rules and the trainable parameters that it was saved with"):
        optimizer(None).load_state_dict(saved)


class Lion(torch.optim.Optimizer):
    """An optimizer that this package does not know."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0, sharpness=2.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "sharpness": sharpness})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * torch.sign(parameter.grad)


def test_groups_of_an_override_replace_those_of_the_trainer(make_trainer):
    class Own(Trainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args, model=None):
            kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
            return kind, {**options, "params": [{"params": list(model.parameters()), "lr": 0.25}]}

    trainer = make_trainer(trainer_class=Own, optim="sgd")
    assert trainer.get_learning_rates() == [0.25]
    trainer.train()
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [0.25]


def test_two_ways_to_choose_an_optimizer_are_refused_together(make_trainer):
    optimizer = torch.optim.SGD(Classifier().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="given an optimizer and optimizer_cls_and_kwargs; pass one of them"):
        make_trainer(optimizers=(optimizer, None), optimizer_cls_and_kwargs=(Lion, {}))
    with pytest.raises(ValueError, match="given optimizers and a model_init: every run makes a new model"):
        make_trainer(model_init=Classifier, optimizers=(optimizer, None))


def test_the_group_of_a_parameter_is_found(make_trainer):
    trainer = make_trainer(model=Encoder(), parameter_rules=[{"params": "head", "lr_scale": 0.5}])
    trainer.create_optimizer()
    assert trainer.get_optimizer_group(trainer.model.head.weight)["rule"] == "head"
    for index, group in enumerate(trainer.optimizer.param_groups):
        assert all(trainer.get_optimizer_group(member) is group for member in group["params"]), index
    assert [len(members) for members in trainer.get_optimizer_group()] == [2, 4, 1, 1]
    with pytest.raises(ValueError, match=r"no parameter group holds this tensor of shape \(3,\)"):
        trainer.get_optimizer_group(torch.zeros(3))


def test_a_schedule_needs_an_optimizer(make_trainer):
    with pytest.raises(ValueError, match="a schedule needs an optimizer; call create_optimizer first"):
        make_trainer().create_scheduler(10)
