import contextlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tr_log import MLflowTracker, TensorBoardTracker, Tracker, WandbTracker
from tr_log.tracker import run_name, settings, tracker_name


class Memory(Tracker):
    """A tracker that keeps what it is told, and can be made to fail."""

    name = "memory"

    def __init__(self):
        super().__init__()
        self.calls = []
        self.failing = None

    def open(self, args, state, model):
        self.calls.append("open")

    def record(self, step, numbers):
        if self.failing is not None:
            raise self.failing
        self.calls.append((step, numbers))

    def close(self, *, failed):
        self.calls.append(("close", failed))


def test_keys_get_their_places():
    keys = ["eval_loss", "eval_second_set_f1", "test_loss", "loss", "evaluation", "test"]
    names = ["eval/loss", "eval/second_set_f1", "test/loss", "train/loss", "train/evaluation", "train/test"]
    assert [tracker_name(key) for key in keys] == names


def test_a_training_is_opened_recorded_and_closed(tmp_path, make_loop):
    tracker = Memory()
    make_loop([tracker], tmp_path, max_steps=1).train(eval_steps=1)
    assert [call if isinstance(call, str) else call[0] for call in tracker.calls] == ["open", 1, 1, 1, "close"]
    assert tracker.calls[1] == (
        1,
        {"train/loss": 1.0, "train/grad_norm": 1.25, "train/learning_rate": 1e-5, "train/epoch": 2.0},
    )
    assert tracker.calls[2][1]["eval/loss"] == 0.5
    assert tracker.calls[-1] == ("close", False)


def test_a_training_that_fails_is_closed_as_failed(tmp_path, make_loop):
    tracker = Memory()
    with pytest.raises(KeyError):
        make_loop([tracker], tmp_path).train(stop_at=1, error=KeyError("boom"))
    assert tracker.calls[-1] == ("close", True)


def test_an_exception_on_its_way_through_the_caller_counts_as_a_failure(tmp_path, make_loop):
    tracker = Memory()
    loop = make_loop([tracker], tmp_path)
    loop.fire("on_train_begin")
    with contextlib.suppress(KeyError):
        try:
            raise KeyError("boom")
        finally:
            loop.fire("on_train_end")
    assert tracker.calls[-1] == ("close", True)


def test_an_evaluation_outside_a_training_opens_and_closes_it(tmp_path, make_loop):
    tracker = Memory()
    make_loop([tracker], tmp_path).evaluate()
    assert [call if isinstance(call, str) else call[0] for call in tracker.calls] == ["open", 0, "close"]


def test_what_is_no_number_is_left_out_with_one_warning(tmp_path, make_loop, caplog):
    tracker = Memory()
    loop = make_loop([tracker], tmp_path)
    for _ in range(2):
        loop.log({"loss": 0.5, "confusion": [[1, 2], [3, 4]]})
    assert tracker.calls[1:] == [(0, {"train/loss": 0.5})] * 2
    assert caplog.messages == ["memory takes numbers only: 'confusion' of the log is left out"]


def test_a_tracker_that_cannot_be_opened_is_an_error_at_once(tmp_path, make_loop):
    class Closed(Memory):
        def open(self, args, state, model):
            raise ConnectionError("no route")

    loop = make_loop([Closed()], tmp_path)
    with pytest.raises(ConnectionError, match="no route"):
        loop.train()
    assert loop.state.global_step == 0


def test_a_tracker_that_fails_costs_its_entries_only(tmp_path, make_loop, caplog):
    tracker = Memory()
    tracker.failing = ConnectionError("no route")
    assert make_loop([tracker], tmp_path, max_steps=3).train(eval_steps=0).state.global_step == 3
    assert caplog.messages == [
        "memory could not record: ConnectionError: no route; training goes on without it",
        "memory: 4 log entries were not recorded; metrics.jsonl has them",
    ]


def test_other_processes_never_open_it(tmp_path, make_loop):
    tracker = Memory()
    make_loop([tracker], tmp_path, main=False).train()
    assert tracker.calls == []
    make_loop([tracker], tmp_path, main=True).train()
    assert tracker.calls


def test_a_trial_is_named_after_the_run_and_itself():
    args, state = SimpleNamespace(run_name="mine", output_dir="out/run-3"), SimpleNamespace()
    assert run_name(args, state) == "mine"
    state.is_hyper_param_search, state.trial_name = True, None
    assert run_name(args, state) == "mine run-3"
    state.trial_name = "lr=0.1"
    assert run_name(args, state) == "mine lr=0.1"
    args.run_name = None
    assert run_name(args, state) == "lr=0.1"


def test_settings_hold_no_tokens_and_only_plain_values(tmp_path):
    args = SimpleNamespace(learning_rate=1e-5, hub_token="secret", output_dir=tmp_path, _private=1, none=None)
    model = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "layers": [1, 2]}))
    assert settings(args, model) == {
        "learning_rate": 1e-5,
        "output_dir": str(tmp_path),
        "none": None,
        "model/hidden_size": 8,
        "model/layers": "[1, 2]",
    }


@dataclass
class Described:
    api_key: str


def test_settings_hold_nothing_that_is_named_as_a_secret(tmp_path):
    args = SimpleNamespace(api_key="a", DB_PASSWORD="b", token="c", aws_secret="d", tokens=3, key="left")
    args.tracker = {"entity": "me", "credentials": "e", "inner": {"apikey": "f"}}
    model = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {"secret": "g", "size": 8}))
    kept = {"tokens": 3, "key": "left", "tracker": "{'entity': 'me', 'inner': {}}", "model/size": 8}
    assert settings(args, model) == kept


def test_settings_have_one_rule_of_secrets_at_every_depth():
    secret = "correct-horse-battery"
    args = SimpleNamespace(wandb_key=secret, image_token="<image>", services=[{"api_key": secret, "name": "a"}])
    config = {
        "auth_map": {"x": {"private_key": secret}}, "aws_access_key_id": secret, "passphrase": secret,
        "headers": {"authorization": secret}, "mask_token": "[MASK]", "pad_token_id": 0,
        "storage": f"postgres://me:{secret}@db/x", "described": Described(secret),
    }  # fmt: skip
    assert settings(args, SimpleNamespace(config=SimpleNamespace(to_dict=lambda: config))) == {
        "image_token": "<image>", "services": "[{'name': 'a'}]", "model/auth_map": "{'x': {}}", "model/headers": "{}",
        "model/mask_token": "[MASK]", "model/pad_token_id": 0, "model/storage": "postgres://***@db/x",
        "model/described": "Described(api_key='***')",
    }  # fmt: skip


def test_arguments_that_describe_themselves_are_asked():
    assert settings(SimpleNamespace(to_sanitized_dict=lambda: {"a": 1}, b=2)) == {"a": 1}
    assert settings(SimpleNamespace(to_dict=lambda: {"a": 1}, b=2)) == {"a": 1}


@pytest.mark.parametrize(
    ("kind", "package"), [(TensorBoardTracker, "tensorboard"), (WandbTracker, "wandb"), (MLflowTracker, "mlflow")]
)
def test_a_missing_package_is_named_with_what_to_install(monkeypatch, kind, package):
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    expected = (
        f"report_to names '{package}', but the package {package} is not installed: "
        rf"run `pip install 'tr-log\[{package}\]'`, or take {package} out of report_to"
    )
    with pytest.raises(ImportError, match=expected):
        kind.from_arguments(None)
