"""The page about TRL and LoRA: its script and its commands, as they are."""

from pathlib import Path

import pytest
from shared.typed_page import type_page

PAGE = Path(__file__).parents[2] / "packages/tr-all/docs/how-to/sft-with-trl.md"


@pytest.mark.slow
def test_what_the_page_says_to_type_can_be_typed_and_both_trainers_agree(tmp_path):
    done = type_page(PAGE, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "equal: 6 log entries, to the bit" in done.stdout
    assert (tmp_path / "sft/adapter_model.safetensors").is_file()
