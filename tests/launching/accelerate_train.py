"""A loop as Accelerate's documentation has it, with checkpoints, an optimizer and logs of these packages beside it.

What these packages add is marked; the rest is the documentation's, but for AdamW, which transformers no longer has.
"""

import json
import os
import sys
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_scheduler

from tr_ckpt import Checkpointer, RNGState  # added
from tr_log import MetricsFile, configure  # added
from tr_optim import Adafactor, parameter_groups  # added


def texts(number, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (number, 12), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 2} for row in tokens]


def training_function(model=None):
    batch_size, stop_at = int(os.environ.get("BATCH_SIZE", "2")), int(os.environ.get("STOP_AT", "-1"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator()
    if model is None:
        model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
    optimizer = Adafactor(parameter_groups(model, weight_decay=0.01), lr=3e-3, relative_step=False)  # added
    train_dataloader = DataLoader(texts(24, 0), batch_size=batch_size)
    eval_dataloader = DataLoader(texts(10, 1), batch_size=batch_size)

    train_dataloader, eval_dataloader, model, optimizer = accelerator.prepare(
        train_dataloader, eval_dataloader, model, optimizer
    )

    num_epochs = 2
    num_training_steps = num_epochs * len(train_dataloader)
    lr_scheduler = get_scheduler(
        "linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=num_training_steps
    )

    # Added: checkpoints, from which a second start goes on, and logs.
    rank, world_size = accelerator.process_index, accelerator.num_processes
    configure(rank=rank, world_size=world_size)
    checkpointer = Checkpointer(
        "run", rank=rank, world_size=world_size, gather_objects=lambda value: gather_object([value])
    )
    inner = accelerator.unwrap_model(model)
    parts = {"model": inner, "optimizer": optimizer, "schedule": lr_scheduler, "rng": RNGState()}
    step = begin = checkpointer.restore(parts) or 0
    state = SimpleNamespace(
        global_step=step, max_steps=num_training_steps, is_world_process_zero=rank == 0, log_history=[]
    )
    metrics, args = MetricsFile(), SimpleNamespace(output_dir="run", disable_tqdm=True)
    metrics.on_train_begin(args, state, None)

    model.train()
    for epoch in range(begin // len(train_dataloader), num_epochs):
        done = begin - epoch * len(train_dataloader)
        batches = accelerator.skip_first_batches(train_dataloader, done) if done > 0 else train_dataloader
        for batch in batches:
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)

            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

            step += 1  # added, to the end of the loop
            mean = accelerator.gather(loss.detach()).mean().item()
            state.global_step = step
            state.log_history.append({"loss": mean, "step": step})
            metrics.on_log(args, state, None, logs={"loss": mean})
            checkpointer.save(step, parts)
            if step == stop_at:
                os._exit(3)

    model.eval()
    predictions = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        predictions.append(accelerator.gather_for_metrics(outputs.logits))
    checkpointer.close()
    metrics.on_train_end(args, state, None)
    if accelerator.is_main_process:
        facts = {"world_size": world_size, "strategy": "Accelerator", "begin": begin}
        losses = [entry["loss"] for entry in state.log_history]
        weights = [parameter.double().sum().item() for parameter in inner.parameters()]
        shown = {"losses": losses, "weights": weights, "predictions": torch.cat(predictions).tolist()}
        place = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
        os.write(sys.stdout.fileno(), (json.dumps({**facts, **place, **shown}) + "\n").encode())
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
