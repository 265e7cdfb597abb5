"""Make the folder in which the documentation's lines are run: scripts and a model under the names that these have."""

import shlex
import shutil
import stat
import sys
from pathlib import Path

import torch
from launched_jobs import HERE, SCRIPT, end_of, free_port, seed_file, start, training

BIN = Path(sys.executable).parent
GLUE = Path("examples/pytorch/text-classification/run_glue.py")


def make_model(folder):
    """Save a small BERT, the same each time."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=50, max_position_embeddings=32, num_labels=2, **sizes, **no_dropout)
    BertForSequenceClassification(config).save_pretrained(folder)


class Workplace:
    """A folder with everything that a line of the documentation names.

    Args:
        folder: empty.
        model: what `make_model` saved.
    """

    def __init__(self, folder, model):
        self.folder = folder
        self.library = folder / "transformers"  # some lines go there first
        for place in (folder, self.library):
            (place / GLUE).parent.mkdir(parents=True)
            shutil.copy(HERE / "run_glue.py", place / GLUE)
            shutil.copytree(model, place / "bert-base-cased")
            shutil.copytree(model, place / "google-bert" / "bert-base-cased")
        shutil.copy(SCRIPT, folder / "trainer-program.py")
        shutil.copy(HERE / "accelerate_train.py", folder / "train.py")
        program = folder / "my_app.py"
        program.write_text(f"#!{sys.executable}\n{SCRIPT.read_text('utf-8')}", "utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def configure(self, name, **changes):
        """Write a file of the documentation where `accelerate config` would."""
        place = self.folder / "home" / "accelerate"
        place.mkdir(parents=True)
        seed_file(place, name, **changes).rename(place / "default_config.yaml")

    def run_in_shell(self, text, batch_size, **variables):
        """Run a text as a person does who copies it into a terminal. Returns exit code, output and errors."""
        text = text.replace("...", shlex.join(training(self.folder / "out", batch_size)))
        port = str(free_port())
        place = {"PORT": port, "PET_MASTER_PORT": port, "HF_HOME": str(self.folder / "home")}
        path = {"PATH": f"{BIN}:{self.folder}:/usr/bin:/bin", "TASK_NAME": "mrpc"}
        command = ["bash", "-euo", "pipefail", "-c", text.replace("/tmp/", f"{self.folder}/")]
        return end_of(start(command, cwd=self.folder, **place, **path, **variables))
