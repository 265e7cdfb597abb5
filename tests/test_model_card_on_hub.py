"""The model card is one that the Hub's own client reads, and it is pushed with the model."""

import importlib.util
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants
from shared.data import rows
from shared.models import LinearClassifier

from tr_core import Trainer, TrainingArguments

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning")


def metrics(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "f1_macro": 0.25, "share": float("nan")}


def make_trainer(folder, model=None, **changes):
    options = {
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    return Trainer(
        LinearClassifier() if model is None else model,
        args,
        train_dataset=rows(20),
        eval_dataset=rows(9, 1),
        compute_metrics=metrics,
    )


def test_the_hubs_client_reads_the_card_with_every_detail(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.create_model_card(
        language=["en", "no"],
        license="apache-2.0",
        tags=["mine", "a: b"],
        model_name='A "quoted" name: yes',
        finetuned_from="someone/base",
        tasks=["text-classification", "zero-shot-classification"],
        dataset_tags=["glue", "imdb"],
        dataset=["GLUE", "IMDb"],
        dataset_args=["mrpc"],
    )
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.language == ["en", "no"]
    assert card.data.license == "apache-2.0"
    assert card.data.tags == ["mine", "a: b", "generated_from_trainer"]
    assert card.data.base_model == "someone/base"
    assert card.data.datasets == ["glue", "imdb"]
    assert card.data.metrics == ["accuracy", "f1_macro"]
    assert card.data.model_name == 'A "quoted" name: yes'
    figures = trainer.evaluate()
    results = {(r.task_type, r.dataset_type, r.metric_type): r for r in card.data.eval_results}
    assert len(results) == 2 * 2 * 3
    one = results["text-classification", "glue", "accuracy"]
    assert (one.metric_value, one.dataset_name, one.dataset_args) == (figures["eval_accuracy"], "GLUE", "mrpc")
    assert results["zero-shot-classification", "imdb", "loss"].metric_value == figures["eval_loss"]
    assert "share" not in {kind for _, _, kind in results}


def test_the_hubs_client_reads_a_card_without_details(tmp_path):
    for number, evaluated in enumerate((False, True)):
        trainer = make_trainer(tmp_path / str(number))
        if evaluated:
            trainer.evaluate()
        trainer.create_model_card()
        card = ModelCard.load(tmp_path / str(number) / "README.md")
        assert card.data.tags == ["generated_from_trainer"]
        assert len(card.data.eval_results or ()) == (3 if evaluated else 0)
        card.save(tmp_path / "again.md")  # what the client writes, it reads
        assert ModelCard.load(tmp_path / "again.md").data.to_dict() == card.data.to_dict()


def test_a_model_of_transformers_says_its_library_its_task_and_its_origin(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.BertForSequenceClassification(config)
    model.config._name_or_path = "someone/bert"
    trainer = make_trainer(tmp_path, model)
    trainer.create_model_card()
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("transformers", "someone/bert")
    assert f"- transformers: {transformers.__version__}" in card.text


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub on loopback of tr-ckpt's tests."""
    path = Path(__file__).parent.parent / "packages/tr-ckpt/tests/minihub.py"
    spec = importlib.util.spec_from_file_location("minihub_of_card_tests", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    with module.MiniHub() as server:
        server.token = module.TOKEN
        settings = {
            "ENDPOINT": server.endpoint,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def card_on(hub, name):
    return ModelCard(hub.read(name, "README.md").decode())


def test_the_end_of_training_pushes_the_card_with_the_model(hub, tmp_path):
    trainer = make_trainer(tmp_path / "run", push_to_hub=True, hub_token=hub.token, hub_strategy="end")
    trainer.create_model_card(license="apache-2.0")
    trainer.train()
    card = card_on(hub, "ci/run")
    assert "model.safetensors" in hub.files("ci/run")
    assert card.data.license == "apache-2.0"
    assert len(card.data.eval_results) == 3  # those of the run: there were none when the card was first written
    assert hub.token not in card.content


def test_a_push_on_demand_makes_the_card_of_now(hub, tmp_path):
    trainer = make_trainer(tmp_path / "run", hub_token=hub.token, hub_model_id="ci/other-name")
    trainer.evaluate()
    assert trainer.push_to_hub("My message", dataset="rows", tags="mine").startswith(hub.endpoint)
    card = card_on(hub, "ci/other-name")
    assert card.data.tags == ["mine", "generated_from_trainer"]
    assert {result.dataset_name for result in card.data.eval_results} == {"rows"}
    assert card.data.model_name == "other-name"
    assert hub.titles("ci/other-name")[-1] == "My message"


def test_a_card_written_by_hand_is_pushed_as_it_is(hub, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n", encoding="utf-8")
    trainer = make_trainer(tmp_path / "run", hub_token=hub.token)
    trainer.push_to_hub()
    assert card_on(hub, "ci/run").text.strip() == "# Mine"


def test_the_repository_can_be_made_first(hub, tmp_path):
    make_trainer(tmp_path / "run").init_hf_repo(token=hub.token, private=True)
    assert hub.repositories["ci/run"].private
    make_trainer(tmp_path / "run", hub_token=hub.token).init_hf_repo()  # which is there already
