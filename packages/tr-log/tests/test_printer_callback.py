import ast
import io

from tr_log import PrinterCallback


def test_each_entry_is_printed_as_a_dict_on_one_line(tmp_path, make_loop, capsys):
    loop = make_loop([PrinterCallback()], tmp_path, max_steps=2, disable_tqdm=True).train(eval_steps=0)
    printed = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [{k: v for k, v in entry.items() if k != "step"} for entry in loop.state.log_history]


def test_the_entry_is_left_as_it_was_and_the_operations_are_not_printed(tmp_path, make_loop):
    stream, logs = io.StringIO(), {"train_loss": 0.5, "total_flos": 1.0}
    make_loop([PrinterCallback(stream)], tmp_path).fire("on_log", logs=logs)
    assert logs == {"train_loss": 0.5, "total_flos": 1.0}
    assert stream.getvalue() == "{'train_loss': 0.5}\n"


def test_other_processes_print_nothing(tmp_path, make_loop, capsys):
    make_loop([PrinterCallback()], tmp_path, main=False).train()
    assert capsys.readouterr().out == ""
