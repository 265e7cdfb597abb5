"""Run a stage of LLaMA-Factory, as its command line does, with a tiny model; print the log and the weights as JSON.

Its own demonstration data are used where LLAMA_FACTORY_DATA names their folder, a few lines made here otherwise.
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from programs import llama, text, tokenizer
from transformers import TrainerCallback

# It imports this at its start, and uses it for sound alone; there is no build of it for a torch without CUDA.
if find_spec("torchaudio") is None:
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

DEMONSTRATIONS = {
    "pt": "c4_demo",
    "sft": "alpaca_en_demo",
    "rm": "dpo_en_demo",
    "dpo": "dpo_en_demo",
    "kto": "kto_en_demo",
}


class Recorder(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)  # for dropout: what two trainers draw before a step differs

    def on_train_end(self, args, state, control, model, **kwargs):
        self.state = state
        self.weights = {key: value.double().sum().item() for key, value in model.state_dict().items()}


def row(stage, n):
    if stage == "pt":
        return {"text": text(n, 12)}
    if stage in {"rm", "dpo"}:
        return {"instruction": text(n, 3), "input": "", "chosen": text(n + 1, 4), "rejected": text(n + 2, 3)}
    return {"instruction": text(n, 3), "input": "", "output": text(n + 1, 4), "kto_tag": n % 2 == 0}


def data(folder, stage):
    """Return the arguments that name the data."""
    if given := os.environ.get("LLAMA_FACTORY_DATA"):
        return {"dataset_dir": given, "dataset": DEMONSTRATIONS[stage], "max_samples": 24}
    place = Path(f"{folder}-data")
    place.mkdir(parents=True)
    (place / "rows.json").write_text(json.dumps([row(stage, n) for n in range(24)]))
    columns = {"prompt": "text"} if stage == "pt" else {"prompt": "instruction", "query": "input"}
    columns |= {"response": "output"} if stage in {"sft", "kto"} else {}
    columns |= {"kto_tag": "kto_tag"} if stage == "kto" else {}
    columns |= {"chosen": "chosen", "rejected": "rejected"} if stage in {"rm", "dpo"} else {}
    rows = {"file_name": "rows.json", "columns": columns, "ranking": stage in {"rm", "dpo"}}
    (place / "dataset_info.json").write_text(json.dumps({"rows": rows}))
    return {"dataset_dir": str(place), "dataset": "rows"}


def main(stage, folder, resume=""):
    from llamafactory.train import tuner

    model = f"{folder}-model"
    llama().save_pretrained(model)
    tokenizer().save_pretrained(model)
    recorder = Recorder()
    # One batch for an evaluation, which is then rounded alike.
    steps = {"max_steps": 4, "logging_steps": 1, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 8}
    arguments = {
        "model_name_or_path": model,
        "stage": stage,
        "do_train": True,
        "finetuning_type": "full",
        **data(folder, stage),
        "template": "default",
        "cutoff_len": 32,
        "val_size": 8,
        "compute_accuracy": stage == "sft",
        "output_dir": folder,
        "overwrite_cache": True,
        "disable_gradient_checkpointing": True,  # its own does not know layers of transformers 5.23
        "report_to": "none",
        "learning_rate": 1e-2,
        "seed": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "resume_from_checkpoint": resume or None,
        **steps,
        **batches,
    }
    tuner.run_exp({key: value for key, value in arguments.items() if value is not None}, [recorder])
    names = [name for name in sys.modules if name.startswith(f"llamafactory.train.{stage}.trainer")]
    classes = [kind for name in names for kind in vars(sys.modules[name]).values() if isinstance(kind, type)]
    trainer = next(kind for kind in classes if kind.__module__ in names)
    bases = [kind.__module__ for kind in trainer.__mro__ if kind.__name__ == "Trainer"]
    result = {"log": recorder.state.log_history, "weights": recorder.weights, "base": bases[-1]}
    result["final"], result["more"] = sorted(os.listdir(folder)), None
    Path(folder, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
