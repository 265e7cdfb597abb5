"""A training loop that trains nothing: it fires the events of a trainer at given callbacks, in a trainer's order."""

from types import SimpleNamespace


class Loader:
    """Stands for a data loader of which only the length matters; None is one that cannot tell it."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        if self.batches is None:
            raise TypeError("no length")
        return self.batches


class Loop:
    def __init__(
        self, callbacks, output_dir, *, max_steps=6, main=True, disable_tqdm=False, pause=lambda: None, **args
    ):
        self.callbacks = callbacks
        self.pause = pause
        self.args = SimpleNamespace(output_dir=str(output_dir), disable_tqdm=disable_tqdm, run_name=None, **args)
        self.state = SimpleNamespace(
            global_step=0,
            max_steps=max_steps,
            epoch=0.0,
            num_train_epochs=2,
            is_world_process_zero=main,
            is_local_process_zero=main,
            log_history=[],
            best_metric=None,
            best_global_step=None,
        )

    def fire(self, event, **kwargs):
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self.args, self.state, None, **kwargs)

    def log(self, logs):
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def evaluate(self, batches=3, sized=True):
        for _ in range(batches):
            self.pause()
            self.fire("on_prediction_step", eval_dataloader=Loader(batches if sized else None))
        metrics = {
            "eval_loss": 1 / (1 + self.state.global_step),
            "eval_runtime": 0.5,
            "eval_samples_per_second": 64.0,
            "eval_steps_per_second": 8.0,
            "epoch": self.state.epoch,
        }
        self.log(metrics)
        self.fire("on_evaluate", metrics=metrics)

    def train(self, *, resume=None, stop_at=None, logging_steps=1, eval_steps=2, error=None):
        """Train from the start, or from `resume`: a step and the log history of its checkpoint."""
        self.state.global_step, self.state.log_history = (0, []) if resume is None else (resume[0], list(resume[1]))
        self.fire("on_train_begin")
        try:
            for step in range(self.state.global_step + 1, (stop_at or self.state.max_steps) + 1):
                self.pause()
                self.state.global_step, self.state.epoch = step, 2 * step / self.state.max_steps
                self.fire("on_step_end")
                if step % logging_steps == 0:
                    self.log(
                        {
                            "loss": 1 / step,
                            "grad_norm": 1.25,
                            "learning_rate": 1e-5 * step,
                            "epoch": self.state.epoch,
                        }
                    )
                if eval_steps and step % eval_steps == 0:
                    self.evaluate()
            if error is not None:
                raise error
            if stop_at is None:
                self.log(
                    {
                        "train_runtime": 1.5,
                        "train_samples_per_second": 32.0,
                        "train_loss": 0.5,
                        "epoch": self.state.epoch,
                    }
                )
        except BaseException as caught:
            self.fire("on_train_end", error=caught)
            raise
        if stop_at is None:
            self.fire("on_train_end", error=None)
        return self

    def checkpoint(self):
        """What a checkpoint of this moment would bring back."""
        return self.state.global_step, list(self.state.log_history)
