"""Losses: the function that a user would write, and the ways to hand it to a Trainer."""

from torch.nn import functional as F


def loss_between(run, logits, labels, items=None, smoothing=0.0):
    """Return the mean loss over a batch's targets, or their sum divided by `items`."""
    how = "mean" if items is None else "sum"
    if run.kind == "numbers":
        loss = F.mse_loss(logits, labels, reduction=how)
    else:
        if run.shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        flat = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
        loss = F.cross_entropy(*flat, reduction=how, label_smoothing=smoothing)
    return loss if items is None else loss / items


def function_of(run):
    """Return what `compute_loss_func` is, or None."""
    if run.loss == "function":
        return lambda outputs, labels: loss_between(run, outputs["logits"], labels)
    if run.loss == "function_counted":

        def counted(outputs, labels, num_items_in_batch=None):
            return loss_between(run, outputs["logits"], labels, num_items_in_batch)

        return counted
    return None


def override_of(run):
    """Return a `compute_loss` that a subclass would have."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        if run.loss == "override_looked" and num_items_in_batch is not None:
            assert num_items_in_batch > 0, f"{num_items_in_batch} targets"
            int(num_items_in_batch)
        items = num_items_in_batch if run.loss == "override_counted" else None
        loss = loss_between(run, outputs["logits"], inputs["labels"], items)
        loss = {"loss": loss, "half": loss.detach() / 2} if run.loss == "parts" else loss
        return (loss, outputs) if return_outputs else loss

    return compute_loss
