"""The commands of pages, typed as they are in a folder that has the scripts and the runs that they speak of.

Pages that build on their own files are in `test_documentation.py`; commands that install, in the session `release`;
those of examples, in the session `examples`.
"""

import re
import subprocess
from pathlib import Path

import pytest
from shared.typed_page import COMMANDS, TYPED_ELSEWHERE, environment, free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

SCRIPT = """
import torch
from {library} import HfArgumentParser, Trainer, TrainingArguments


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels=None):
        y = self.layer(x)
        return {{"loss": torch.nn.functional.mse_loss(y, labels), "y": y}}


if __name__ == "__main__":
    torch.manual_seed(0)
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    rows = [{{"x": [n / 100], "labels": [3 * n / 100 + 1]}} for n in range(80)]
    Trainer(Line(), args, train_dataset=rows, eval_dataset=rows[:20]).train()
"""
RUN = "--output_dir {} --max_steps 20 --save_steps 10 --use_cpu true"
EVALUATED = f"{RUN} --eval_strategy steps --eval_steps 10 --metric_for_best_model loss"
# Not to be typed on one machine, or without an end, as they are.
CHANGED = {
    "trainer ckpt diff run/checkpoint-10 run/checkpoint-20": "trainer ckpt diff run/checkpoint-10 run/checkpoint-20 || "
    "[ $? = 1 ]",  # they differ
    "trainer watch out": "timeout --signal=INT 10 trainer watch out || [ $? = 124 ]",
    "--master_addr 10.0.0.1 --master_port 29500 --nproc 8": "--master_addr 127.0.0.1 --master_port PORT --nproc 1",
    "--nnodes 1:4 --rdzv_endpoint 10.0.0.1:29500": "--nnodes 1:1 --rdzv_endpoint 127.0.0.1:PORT",
    "--nproc 8": "--nproc 2",
}


def type_lines(script, folder):
    return subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a script for each Trainer, and with runs of both."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "train.py").write_text(SCRIPT.format(library="tr_all"))
    (folder / "script.py").write_text(SCRIPT.format(library="transformers"))
    loop = re.search(r"^```python\n(.*?)^```", (ROOT / "packages/tr-dist/README.md").read_text("utf-8"), re.S | re.M)
    (folder / "loop.py").write_text(loop[1])
    (folder / "run.yaml").write_text("output_dir: trainer_output\nmax_steps: 20\n")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}')
    runs = ["run", "out", "other", "outputs/mine", "runs/one"]
    lines = [f"python train.py {EVALUATED.format(name)}" for name in runs] + [f"python script.py {RUN.format('their')}"]
    done = type_lines("\n".join(lines), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", TYPED_ELSEWHERE)
def test_the_commands_of_a_page_can_be_typed(name, folder):
    text = (ROOT / f"packages/{name}.md").read_text("utf-8")
    lines = [line for block in COMMANDS.findall(text) for line in block.splitlines()]
    typed = [line for line in lines if not line.startswith(("pip ", "python packages/"))]
    assert typed
    script = "\n".join(typed)
    for written, changed in CHANGED.items():
        script = script.replace(written, changed)
    # A machine of several waits for the others.
    script = re.sub(r"(--nnodes 2 --node_rank 0 [^\n]*)", r"\1 &", script).replace("PORT", free_port())
    done = type_lines(script, folder)
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
