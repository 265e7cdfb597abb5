import subprocess
import sys


def test_importing_the_package_loads_neither_torch_nor_rich_nor_a_tracker():
    heavy = "{'torch', 'rich', 'tensorboard', 'wandb', 'mlflow', 'numpy'}"
    code = f"import sys, tr_log; print(sorted({heavy} & {{m.partition('.')[0] for m in sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_importing_the_package_loads_no_display_and_no_page():
    unwanted = ["html", "tr_log.notebook", "tr_log.screen", "tr_log.report.page", "tr_log.report.run_folder"]
    code = f"import sys, tr_log; print([name for name in {unwanted} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout == "[]\n", found.stderr


def test_a_run_without_a_terminal_never_loads_rich():
    code = "import sys, tr_log\nfor _ in tr_log.progress(range(3)): pass\nprint('rich' in sys.modules)\n"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
