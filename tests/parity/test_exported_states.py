"""States of control and callbacks in the form of transformers' `ExportableState`: each side reads the other's."""

import transformers
from transformers.trainer_callback import TrainerControl as ReferenceControl

import tr_core
from tr_core import TrainerControl


def test_the_state_of_the_control_is_the_same_in_both():
    control = TrainerControl(should_log=True, should_save=True)
    theirs = ReferenceControl.from_state(control.state())
    assert theirs.state() == control.state()
    assert TrainerControl.from_state(theirs.state()) == control


def test_the_state_of_early_stopping_is_the_same_in_both():
    ours = tr_core.EarlyStoppingCallback(3, 0.25)
    ours.early_stopping_patience_counter = 2
    theirs = transformers.EarlyStoppingCallback.from_state(ours.state())
    assert theirs.state() == ours.state()
    assert vars(tr_core.EarlyStoppingCallback.from_state(theirs.state())) == vars(ours)
