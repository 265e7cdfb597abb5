"""Run transformers' example scripts, unedited, on its Trainer and on this one, and count those with equal numbers.

    nox -s ecosystem -- --official-examples FOLDER

FOLDER is `examples/pytorch` of a checkout of transformers, or any folder with scripts of these names below it. Each
runs by `trainer drop-in --compare` on tiny models and data that are made here, on a CPU, offline. With `--work`, what
an earlier call ran is not run again.
"""

import argparse
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT = 1800  # seconds for both runs of a script
EXIT_EQUAL, EXIT_DIFFERENT = 0, 1  # of `trainer drop-in --compare`
COMMON = (
    "--output_dir out --do_train --do_eval --max_steps 6 --per_device_train_batch_size 4 "
    "--per_device_eval_batch_size 4 --logging_steps 1 --eval_strategy steps --eval_steps 3 --save_steps 3 "
    "--learning_rate 1e-3 --seed 3 --report_to none --use_cpu --disable_tqdm True"
)


EQUAL, EVALUATION, NAMED = "equal to the bit", "equal in training", "differs by a known row"
EVALUATED = ("eval_", "test_", "predict_")  # beginnings of their keys


@dataclass(frozen=True)
class Case:
    """One way in which a script is run.

    Attributes:
        name: shown in the table.
        script: its file's name.
        arguments: what it is given beside `COMMON`.
        needs: a module without which it cannot run.
        after: the case from whose checkpoint it resumes.
        same_draws: whether both runs draw the same random numbers.
    """

    name: str
    script: str
    arguments: str
    needs: str = ""
    after: str = ""
    same_draws: bool = False


def _files(name, ending="json"):
    return f"--train_file {name}.train.{ending} --validation_file {name}.validation.{ending}"


_SHORT = "--model_name_or_path bert --max_seq_length 24"
_RESUMED = "--resume_from_checkpoint runs/glue/transformers/out/checkpoint-3"
_WRITTEN = "--model_name_or_path t5 --predict_with_generate --max_source_length 24 --max_target_length 8"
_ASKED = "--predict_with_generate --max_seq_length 24 --max_answer_length 8"
_LINES = f"{_files('plain', 'txt')} --block_size 16"
CASES = (
    Case("glue", "run_glue.py", f"{_files('pairs')} {_SHORT}"),
    Case("glue, accumulated", "run_glue.py",
         f"{_files('pairs', 'csv')} {_SHORT} --pad_to_max_length False --gradient_accumulation_steps 2"),
    Case("glue, resumed", "run_glue.py", f"{_files('pairs')} {_SHORT} {_RESUMED}",
         after="glue"),
    Case("classification, one label", "run_classification.py", f"{_files('classes')} {_SHORT}"),
    Case("classification, several labels", "run_classification.py", f"{_files('several')} {_SHORT}"),
    Case("classification, regression", "run_classification.py", f"{_files('scores')} {_SHORT} --do_regression True"),
    Case("xnli", "run_xnli.py", f"{_SHORT} --language en --do_predict"),
    Case("clm, a file", "run_clm.py", f"{_LINES} --model_name_or_path llama"),
    Case("clm, a stream", "run_clm.py", f"{_LINES} --model_name_or_path llama --streaming"),
    Case("clm, a configuration", "run_clm.py",
         f"{_LINES} --config_name llama --tokenizer_name tokenizer"),
    Case("mlm", "run_mlm.py", f"{_files('plain', 'txt')} {_SHORT} --line_by_line"),
    Case("mlm, same draws", "run_mlm.py", f"{_files('plain', 'txt')} {_SHORT} --line_by_line", same_draws=True),
    Case("plm", "run_plm.py", f"{_files('plain', 'txt')} --model_name_or_path xlnet --max_seq_length 16"),
    Case("fim", "run_fim.py", f"{_LINES} --model_name_or_path llama"),
    Case("swag", "run_swag.py", f"{_files('endings')} {_SHORT}"),
    Case("qa", "run_qa.py", f"{_files('questions')} {_SHORT} --doc_stride 4"),
    Case("qa, beam search", "run_qa_beam_search.py",
         f"{_files('questions')} --model_name_or_path xlnet --max_seq_length 24 --doc_stride 4 --n_best_size 3"),
    Case("qa, written", "run_seq2seq_qa.py",
         f"{_files('questions')} --model_name_or_path t5 {_ASKED}"),
    Case("summarization", "run_summarization.py", f"{_files('summaries')} {_WRITTEN}"),
    Case("translation", "run_translation.py", f"{_files('translations')} {_WRITTEN} --source_lang en --target_lang de"),
    Case("ner", "run_ner.py", f"{_files('tags')} --model_name_or_path bert --max_seq_length 24"),
    *(Case(f"{name}{end}", script, f"{arguments} --remove_unused_columns False", "torchvision", same_draws=bool(end))
      for end in ("", ", same draws")
      for name, script, arguments in (
          ("image classification", "run_image_classification.py",
           "--train_dir images/train --validation_dir images/validation --model_name_or_path vit"),
          ("masked images", "run_mim.py",
           "--dataset_name images --model_name_or_path vit --image_size 32 --patch_size 8 --mask_patch_size 8"),
          ("masked autoencoder", "run_mae.py",
           "--dataset_name images --model_name_or_path vit_mae --base_learning_rate 1e-3"))),
)  # fmt: skip


@dataclass
class Outcome:
    """What came of one case: its word in the table, and what explains it."""

    case: Case
    word: str
    why: str = ""


def run_case(case, scripts, work):
    """Run one case; return its outcome."""
    if case.needs and not find_spec(case.needs):
        return Outcome(case, "not run", f"needs {case.needs}")
    into = work / "runs" / case.name.replace(", ", "-").replace(" ", "-")
    if (into / "outcome.json").exists():
        return Outcome(case, **json.loads((into / "outcome.json").read_text()))
    shutil.rmtree(into, ignore_errors=True)
    command = [str(Path(sys.executable).with_name("trainer")), "drop-in", "--compare", "--into", str(into)]
    if case.same_draws:
        command.append("--same-draws")
    words = [*command, str(scripts[case.script]), *COMMON.split(), *case.arguments.split()]
    paths = [str(HERE / "offline"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["HF_HOME"] = str(work / "home")
    environment["HF_DATASETS_CACHE"] = str(into / "cache")
    into.parent.mkdir(parents=True, exist_ok=True)
    log = into.with_name(f"{into.name}.txt")
    with log.open("wb") as file:
        process = subprocess.Popen(words, cwd=work, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Outcome(case, "failed", f"did not end in {LIMIT} s")
    outcome = judged(case, code, log.read_text(errors="replace"), into)
    (into / "outcome.json").write_text(json.dumps({"word": outcome.word, "why": outcome.why}))
    return outcome


def judged(case, code, shown, into):
    """Return the outcome of a case that has run, by the exit status of the command and what it showed."""
    if code not in (EXIT_EQUAL, EXIT_DIFFERENT):
        lines = [line.strip() for line in shown.partition("both runs are in")[0].splitlines() if line.strip()]
        on_ours = (into / "ours").exists()
        where = "on this Trainer" if on_ours else "on transformers' Trainer too"
        return Outcome(case, "failed" if on_ours else "fails there too", f"{where}: {lines[-1] if lines else ''}"[:160])
    found = json.loads((into / "comparison.json").read_text())
    if code == EXIT_EQUAL:
        return Outcome(case, EQUAL, f"{found['entries']} log entries")
    if found["causes"]:
        trained_alike = found["weights_equal"] and all(key.startswith(EVALUATED) for key in found["differing"])
        return Outcome(case, EVALUATION if trained_alike else NAMED, "; ".join(found["causes"]))
    return Outcome(case, "different", str(into))


def table(outcomes):
    """Return the outcomes and their counts as text."""
    widths = [max(len(getattr(outcome.case, name)) for outcome in outcomes) for name in ("name", "script")]
    lines = [f"{o.case.name:{widths[0]}}  {o.case.script:{widths[1]}}  {o.word:23}  {o.why}".rstrip() for o in outcomes]
    words = list(dict.fromkeys(outcome.word for outcome in outcomes))
    counts = [f"{sum(o.word == word for o in outcomes)} {word}" for word in sorted(words)]
    total = f"{len(outcomes)} runs: {', '.join(counts)}"
    good = len({outcome.case.script for outcome in outcomes if outcome.word in (EQUAL, EVALUATION)})
    return "\n".join([*lines, "", total, f"scripts whose training is equal to the bit: {good}"])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the scripts, in it or below it")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one case; give it again for more")
    parser.add_argument("--work", type=Path, help="where to keep the runs (default: a temporary folder)")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 1) // 2, 1), help="how many at once")
    given = parser.parse_args(argv)
    scripts = {path.name: path.resolve() for path in sorted(given.folder.rglob("run_*.py"))}
    cases = [case for case in CASES if case.script in scripts and (not given.only or case.name in given.only)]
    if not cases:
        parser.error(f"none of {', '.join(sorted({case.script for case in CASES}))} is in {given.folder} or below it")
    sys.path.insert(0, str(HERE))
    work = (given.work or Path(tempfile.mkdtemp(prefix="official-examples-"))).resolve()
    prepare(work)
    outcomes = {}
    for later in (False, True):
        with ThreadPoolExecutor(given.jobs) as pool:
            for outcome in pool.map(
                lambda case: run_case(case, scripts, work), [c for c in cases if bool(c.after) == later]
            ):
                outcomes[outcome.case] = outcome
                print(f"{outcome.case.name}: {outcome.word} ({outcome.why})", flush=True)
    print(f"\n{table([outcomes[case] for case in cases])}\n\nreports are in {work / 'runs'}")
    return int(any(outcome.word in ("failed", "different") for outcome in outcomes.values()))


def prepare(work):
    """Make models and data in a folder, unless an earlier call did."""
    if not (work / "made").exists():
        kept = runpy.run_path(str(HERE / "offline/sitecustomize.py"))  # as in the processes of the scripts
        import tiny_files

        work.mkdir(parents=True, exist_ok=True)
        tiny_files.save_models(work)
        tiny_files.save_data(work)
        (work / "made").touch()
        del kept


if __name__ == "__main__":
    sys.exit(main())
