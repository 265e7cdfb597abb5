import re
from pathlib import Path


def test_the_readmes_examples_run():
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
