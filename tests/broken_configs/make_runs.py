"""Make the runs that the files of this folder resume: a whole one, a damaged one, one of the model alone."""

import shutil
from pathlib import Path

import parts


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


parts.train(output_dir="run", log_level="error")
shutil.copytree("run", "damaged")
truncate(Path("damaged/checkpoint-4/optimizer.safetensors"))
parts.train(output_dir="weights", log_level="error", save_only_model=True)
