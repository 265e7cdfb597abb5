"""The names that others may rely on."""

import subprocess
import sys
from pathlib import Path

import tr_ckpt


def test_the_public_names_are_the_frozen_ones():
    frozen = (Path(__file__).parent.parent / "api.txt").read_text().split()
    assert sorted(tr_ckpt.__all__) == frozen
    assert all(getattr(tr_ckpt, name) is not None for name in frozen)


def test_a_wrong_name_is_an_attribute_error():
    assert not hasattr(tr_ckpt, "Checkpoint")


def test_importing_touches_no_hub_and_public_modules_need_no_import_of_their_own():
    code = (
        "import sys, tr_ckpt, tr_ckpt.command; from tr_ckpt import HubCallback; "
        "tr_ckpt.hf_import.convert; tr_ckpt.sharded.stateful; sys.exit('huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
