"""A callback that ends a run at a step, as if it were interrupted there."""


class StopAt:
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step
