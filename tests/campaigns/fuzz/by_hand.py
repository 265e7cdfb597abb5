"""The same run as a plain loop of torch: the oracle that knows no Trainer."""

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import torch
from fuzz_data import IGNORED, evaluation_data, own_loader, stack, training_data
from fuzz_losses import function_of, loss_between
from fuzz_models import model_of
from fuzz_optimizers import optimizer_of, schedule_of
from fuzz_trace import Trace, figures

GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def mixed(state):
    """Mix 64 bits, as SplitMix64 does."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def computed_order(length, seed, epoch):
    """Return the computed order of few samples: they are sorted by numbers mixed from seed, epoch and sample."""
    state = GOLDEN
    for number in (seed, epoch, 1):
        state = mixed(state + number * GOLDEN & MASK)
    return sorted(range(length), key=lambda sample: mixed(sample * GOLDEN + (state >> 2) & MASK) >> 1)


class ByHand:
    """A run, with those attributes of a Trainer that habits touch; `tell` has them act at an event."""

    def __init__(self, run, tell):
        self.run, self.tell, self.model, self.trace = run, tell, model_of(run.model), Trace()
        plain = replace(run, data="list") if run.data == "columns" else run
        self.train_dataset, self.eval_dataset = training_data(plain), evaluation_data(run)
        self.data_collator, self.compute_loss_func, self.compute_metrics = stack, function_of(run), figures
        self.args, self.optimizer, self.lr_scheduler = SimpleNamespace(max_grad_norm=run.clip), None, None
        self.state, self.control = SimpleNamespace(global_step=0), SimpleNamespace()
        self.prepare_inputs = dict
        self.trace.watch(self.model)

    def train(self):
        run, self.state.global_step, self.trace.steps, self.trace.evaluations = self.run, 0, [], []
        torch.manual_seed(run.seed)
        self.model.train()
        self.loader = None if run.loader == "trainer" else own_loader(run, self.train_dataset)
        self.optimizer = self.optimizer or optimizer_of(run, self.model)
        self.lr_scheduler = self.lr_scheduler or schedule_of(run, self.optimizer, run.steps)
        self.control.should_training_stop = self.control.should_evaluate = False
        self.tell(self, "on_train_begin")
        self.evaluate_if(run.eval_first)
        self.last_step, epoch, samples = run.steps, 0, 0
        while epoch < self.run.most_epochs and not self.control.should_training_stop:
            epoch, samples = self.train_epoch(epoch, samples)
        self.trace.finish(self.model, self.optimizer)
        self.optimizer = self.lr_scheduler = None

    def train_epoch(self, epoch, samples):
        """Train after so many samples of an epoch, to its end or to where the run changes; return where that is."""
        run, self.control.should_epoch_stop = self.run, False
        self.tell(self, "on_epoch_begin")
        batches = list(self.batches(epoch, samples))
        for first in range(0, len(batches), run.accumulation):
            of_step = batches[first : first + run.accumulation]
            self.step(of_step)
            samples += sum(len(batch["labels"]) for batch in of_step)
            self.evaluate_if(False)
            if run.changed and self.state.global_step == run.stops[0][1]:
                is_over = first + run.accumulation >= len(batches)
                return self.change(*((epoch + 1, 0) if is_over else (epoch, samples)))
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.tell(self, "on_epoch_end")
        self.evaluate_if(run.evaluation == "epoch")
        return epoch + 1, 0

    def change(self, epoch, samples):
        """Go on as the resumed run does; return its place in the data."""
        before, self.run = self.run, self.run.after_the_change()
        run, step = self.run, self.state.global_step
        self.train_dataset, self.loader = training_data(run), None
        left = -(-(run.length - samples) // (run.batch * run.accumulation)) if run.data != "stream" else 0
        left += (run.most_epochs - epoch - 1) * run.steps_per_epoch
        if samples and run.restarts:
            again = (run.most_epochs - epoch) * run.steps_per_epoch
            left = min(
                again,
                -(-(self.last_step - step) * before.batch * before.accumulation // (run.batch * run.accumulation)),
            )
            samples = 0
        self.last_step = run.max_steps if run.max_steps > 0 else step + left
        return epoch, samples

    def batches(self, epoch, samples=0):
        run, data = self.run, self.train_dataset
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        if self.loader is not None:
            # As transformers does, too: not to the loader's end, where a sampler may draw from its generator once more.
            yield from islice(self.loader, len(self.loader))
            return
        seed = run.seed if run.data_seed is None else run.data_seed
        order = range(run.length)
        if run.order == "random_computed":
            order = computed_order(run.length, seed, epoch)
        elif run.order == "random" and not run.is_stream:
            order = torch.randperm(run.length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        rows = list(data) if run.is_stream else data
        last = run.batches_per_epoch * run.batch if run.drop_last else run.length
        for first in range(samples, last, run.batch):
            yield self.data_collator([rows[index] for index in order[first : min(first + run.batch, last)]])

    def step(self, batches):
        self.tell(self, "on_step_begin")
        items, step_loss = sum(self.targets(batch) for batch in batches), 0.0
        for number, batch in enumerate(batches, start=1):
            if not self.model.training:
                self.model.train()
            loss = self.loss(self.prepare_inputs(batch), items) / (1 if self.run.divides else len(batches))
            loss.backward()
            step_loss += loss.item()
            if number < len(batches):
                self.tell(self, "on_substep_end")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm or float("inf"))
        self.tell(self, "on_pre_optimizer_step")
        self.optimizer.step()
        self.tell(self, "on_optimizer_step")
        self.trace.steps.append((step_loss, norm.item(), self.optimizer.param_groups[0]["lr"]))
        if not self.follows_metric:
            self.lr_scheduler.step()
        self.model.zero_grad()
        self.state.global_step += 1
        self.control.should_training_stop |= self.state.global_step == self.last_step
        self.control.should_evaluate = self.is_due()
        self.tell(self, "on_step_end")

    # What is not the loop

    def loss(self, batch, items):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.run.bf16):
            return self.plain_loss(dict(batch), items)

    def plain_loss(self, batch, items):
        run = self.run
        if run.loss in ("model", "model_uncounted"):
            return self.model(**batch, **({"num_items_in_batch": items} if run.divides else {}))["loss"]
        labels = batch.pop("labels")
        outputs, given = self.model(**batch), items if run.divides else None
        if self.compute_loss_func is not None:
            return self.compute_loss_func(outputs, labels, **({"num_items_in_batch": given} if run.divides else {}))
        return loss_between(run, outputs["logits"], labels, given, 0.2 if run.loss == "smoothing" else 0.0)

    def targets(self, batch):
        labels = batch["labels"][:, 1:] if self.run.shifts else batch["labels"]
        return labels.ne(IGNORED).sum()

    @property
    def follows_metric(self):
        return isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def is_due(self):
        step, every = self.state.global_step, self.run.eval_steps
        every = every if every >= 1 else -int(-every * self.run.steps // 1)
        return (
            self.run.evaluation == "steps"
            and step >= self.run.eval_delay
            and (step % every == 0 or step == self.run.steps)
        )

    def evaluate_if(self, is_due):
        if is_due or self.control.should_evaluate:
            self.control.should_evaluate = False
            mean = self.evaluate()
            if self.follows_metric and self.state.global_step:
                self.lr_scheduler.step(mean)

    def evaluate(self):
        sets, modes = self.eval_dataset, [module.training for module in self.model.modules()]
        for name, data in sets.items() if isinstance(sets, dict) else (("", sets),):
            self.model.eval()
            mean, kept = self.mean_loss(data)
            prefix = f"eval_{name}_" if name else "eval_"
            labels = SimpleNamespace(label_ids=[batch["labels"] for batch in kept])
            metrics = self.compute_metrics(labels) if self.run.metrics else {}
            found = {prefix + metric: value for metric, value in {"loss": mean, **metrics}.items()}
            self.trace.evaluations.append((self.state.global_step, found))
            self.tell(self, "on_evaluate")
        for module, mode in zip(self.model.modules(), modes, strict=True):
            module.training = mode
        return mean

    def mean_loss(self, data):
        total, weights, kept = 0.0, 0.0, list(self.evaluation_batches(data))
        with torch.no_grad():
            for batch in kept:
                items = self.targets(batch)
                weight = float(items) if self.run.divides else len(batch["labels"])
                total, weights = total + float(self.loss(batch, items)) * weight, weights + weight
        return total / weights, kept

    def evaluation_batches(self, data):
        for first in range(0, len(data), self.run.eval_batch):
            rows = [data[index] for index in range(first, min(first + self.run.eval_batch, len(data)))]
            if len(rows) == self.run.eval_batch or not self.run.drop_last:
                yield self.data_collator(rows)

    def predict(self):
        self.model.eval()
        batches = self.evaluation_batches(evaluation_data(self.run))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.run.bf16):
            found = [self.model(**{n: v for n, v in b.items() if n != "labels"})["logits"].float() for b in batches]
        self.trace.predictions = torch.cat(found)
