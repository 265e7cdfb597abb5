"""Input tokens: how many are counted, and which entries of the log hold them."""

import parity_data as data
import parity_models as models
from parity_harness import OURS, REFERENCE, Scenario, run


def test_the_count_goes_on_over_a_resume(tmp_path):
    counts = []
    for side in (REFERENCE, OURS):
        options = {"include_num_input_tokens_seen": "all", "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
        scenario = Scenario(models.llama, data.tokens(), arguments=options)
        whole = run(side, scenario, tmp_path / side.name)
        again = run(
            side, scenario, tmp_path / side.name, resume_from_checkpoint=str(tmp_path / side.name / "checkpoint-4")
        )
        counts.append([entry["num_input_tokens_seen"] for entry in again.trainer.state.log_history])
        assert counts[-1] == [entry["num_input_tokens_seen"] for entry in whole.trainer.state.log_history]
    assert counts[0] == counts[1]
