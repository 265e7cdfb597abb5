"""Train tiny models with trainers of more libraries, each a requirement of its own; as `programs.py` does."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from programs import (
    EVALUATED,
    WORDS,
    Reseeded,
    columns,
    llama,
    main,
    options,
    pairs,
    saved_bert,
    text,
    tokenizer,
)
from transformers import BertModel, DataCollatorForLanguageModeling, Trainer, TrainingArguments


def orpo(folder):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    args, data = ORPOConfig(**options(folder, **EVALUATED), max_length=16), pairs()
    parts = {"train_dataset": data, "eval_dataset": data.select(range(8)), "processing_class": tokenizer()}
    return ORPOTrainer(llama(), args=args, **parts)


def cpo(folder):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    args = CPOConfig(**options(folder), max_length=16)
    return CPOTrainer(llama(), args=args, train_dataset=pairs(), processing_class=tokenizer())


def tpo(folder):
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    data = pairs().add_column("reference", [" " + text(row + 3, 4) for row in range(16)])
    return TPOTrainer(llama(), args=TPOConfig(**options(folder)), train_dataset=data, processing_class=tokenizer())


_CHAT = "{% for turn in messages %}{{ turn['content'] }} {% endfor %}{% if add_generation_prompt %}then {% endif %}"


def gkd(folder):
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    words = tokenizer()
    words.chat_template = _CHAT
    turns = [{"role": "user", "length": 3}, {"role": "assistant", "length": 4}]
    data = columns(messages=lambda n: [{"role": turn["role"], "content": text(n, turn["length"])} for turn in turns])
    args = GKDConfig(**options(folder), max_new_tokens=6, max_length=16)
    parts = {"train_dataset": data, "processing_class": words, "callbacks": [Reseeded()]}
    return GKDTrainer(llama(), llama(initializer_range=0.1), args=args, **parts)


def online_dpo(folder):
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    args = OnlineDPOConfig(**options(folder), max_new_tokens=6, max_length=16)
    parts = {"train_dataset": columns(prompt=lambda n: text(n, 3)), "processing_class": tokenizer()}
    return OnlineDPOTrainer(llama(), llama(), _different, args=args, callbacks=[Reseeded()], **parts)


def _different(prompts, completions, **more):
    return [float(len(set(completion.split()))) for completion in completions]


def bema(folder):
    from trl import DPOConfig
    from trl.experimental.bema_for_ref_model import BEMACallback, DPOTrainer

    follows = BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)
    parts = {"train_dataset": pairs(), "processing_class": tokenizer(), "callbacks": [follows]}
    return DPOTrainer(llama(), ref_model=llama(), args=DPOConfig(**options(folder)), **parts)


def sparse_encoder(folder):
    from sentence_transformers import (
        SparseEncoder,
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
    )
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
    from sentence_transformers.sparse_encoder.models import MLMTransformer, SpladePooling
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    path = f"{folder}-model"
    BertForMaskedLM(BertConfig(vocab_size=32, **sizes)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    model = SparseEncoder(modules=[MLMTransformer(path, max_seq_length=16), SpladePooling()])
    data = columns(anchor=lambda n: text(n, 3), positive=lambda n: text(n + 1, 4))
    ranked = SparseMultipleNegativesRankingLoss(model)
    loss = SpladeLoss(model, ranked, document_regularizer_weight=1e-3, query_regularizer_weight=1e-3)
    args = SparseEncoderTrainingArguments(**options(folder, **EVALUATED))
    parts = {"train_dataset": data, "eval_dataset": data.select(range(8)), "loss": loss}
    return SparseEncoderTrainer(model, args, **parts)


def gliner(folder):
    from gliner import GLiNER, GLiNERConfig
    from gliner.training import Trainer, TrainingArguments

    torch.manual_seed(0)
    size = {"hidden_size": 16, "max_width": 3, "max_len": 32, "num_rnn_layers": 1, "dropout": 0.0}
    model = GLiNER.from_config(GLiNERConfig(model_name=saved_bert(folder), fine_tune=True, **size))
    names = ["animal", "place", "colour"]
    data = [
        {
            "tokenized_text": text(row, 6).split(),
            "ner": [[row % 5, row % 5, names[row % 3]], [5, 5, names[(row + 1) % 3]]],
            "ner_labels": names,
        }
        for row in range(16)
    ]
    args = TrainingArguments(**options(folder, **EVALUATED), remove_unused_columns=False)
    parts = {"train_dataset": data, "eval_dataset": data[:8], "data_collator": model._create_data_collator()}
    words = model.data_processor.transformer_tokenizer
    return Trainer(model=model, args=args, processing_class=words, **parts)


def flag_embedder(folder):
    from FlagEmbedding.abc.finetune.embedder import AbsEmbedderTrainingArguments
    from FlagEmbedding.finetune.embedder.encoder_only.base import BiEncoderOnlyEmbedderModel, EncoderOnlyEmbedderTrainer
    from transformers import AutoModel

    words = tokenizer()
    model = BiEncoderOnlyEmbedderModel(AutoModel.from_pretrained(saved_bert(folder)), words, temperature=0.5)
    data = [{"query": text(row, 3), "passage": text(row + 1, 4)} for row in range(16)]

    def collate(rows):
        sides = {side: words([row[side] for row in rows], padding=True, return_tensors="pt") for side in rows[0]}
        return {"queries": sides["query"], "passages": sides["passage"]}

    args = AbsEmbedderTrainingArguments(**options(folder), remove_unused_columns=False)
    parts = {"train_dataset": data, "data_collator": collate, "tokenizer": words, "callbacks": [Reseeded()]}
    return EncoderOnlyEmbedderTrainer(model=model, args=args, **parts)


def flag_reranker(folder):
    from FlagEmbedding.abc.finetune.reranker import AbsRerankerTrainingArguments
    from FlagEmbedding.finetune.reranker.encoder_only.base import CrossEncoderModel, EncoderOnlyRerankerTrainer
    from transformers import AutoModelForSequenceClassification

    words = tokenizer()
    ranker = AutoModelForSequenceClassification.from_pretrained(saved_bert(folder), num_labels=1)
    data = [[text(row, 3) + " " + text(row + away, 4) for away in range(3)] for row in range(16)]

    def collate(rows):
        return {"pair": words([pair for row in rows for pair in row], padding=True, return_tensors="pt")}

    args = AbsRerankerTrainingArguments(**options(folder), remove_unused_columns=False)
    model = CrossEncoderModel(ranker, words, train_batch_size=4)
    parts = {"train_dataset": data, "data_collator": collate, "tokenizer": words, "callbacks": [Reseeded()]}
    return EncoderOnlyRerankerTrainer(model=model, args=args, **parts)


def gliclass(folder):
    from gliclass import GLiClassModel, GLiClassModelConfig
    from gliclass.data_processing import AugmentationConfig, DataCollatorWithPadding, GLiClassDataset
    from gliclass.training import Trainer, TrainingArguments
    from transformers import AutoConfig

    torch.manual_seed(0)
    path, words = saved_bert(folder), tokenizer()
    words.add_tokens(["<<LABEL>>", "<<SEP>>", "<<EXAMPLE>>"], special_tokens=True)
    kinds = {"problem_type": "multi_label_classification", "architecture_type": "uni-encoder"}
    config = GLiClassModelConfig(
        encoder_config=AutoConfig.from_pretrained(path), encoder_model=path, class_token_index=26, text_token_index=27,
        example_token_index=28, scorer_num_heads=2, scorer_mlp_hidden_size=16, max_num_classes=4, **kinds,
    )  # fmt: skip
    model = GLiClassModel(config)
    labels = ["animal", "place", "colour"]
    rows = [{"text": text(row, 6), "all_labels": labels, "true_labels": [labels[row % 3]]} for row in range(16)]
    augmented = AugmentationConfig(enabled=False)
    data = GLiClassDataset(rows, words, augmented, max_length=32, shuffle_labels=False, **kinds)
    args = TrainingArguments(**options(folder), remove_unused_columns=False)
    parts = {"train_dataset": data, "data_collator": DataCollatorWithPadding(device="cpu"), "callbacks": [Reseeded()]}
    return Trainer(model=model, args=args, processing_class=words, **parts)


def chronos(folder):
    from chronos.chronos2.config import Chronos2CoreConfig
    from chronos.chronos2.dataset import Chronos2Dataset
    from chronos.chronos2.model import Chronos2Model
    from chronos.chronos2.trainer import Chronos2Trainer, EvaluateAndSaveFinalStepCallback

    torch.manual_seed(0)
    patches = {"input_patch_size": 4, "output_patch_size": 4, "input_patch_stride": 4, "context_length": 16}
    forecasts = {**patches, "quantiles": [0.1, 0.5, 0.9], "max_output_patches": 2, "use_reg_token": True}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    model = Chronos2Model(Chronos2CoreConfig(**sizes, chronos_config=forecasts))
    series = [torch.sin(torch.arange(40.0) * (1 + row) / 9) for row in range(8)]
    given = {"inputs": series, "context_length": 16, "prediction_length": 4, "batch_size": 4, "output_patch_size": 4}
    data = Chronos2Dataset(**given, min_past=4, mode="train")
    held_out = Chronos2Dataset(**given, mode="validation")
    args = TrainingArguments(**options(folder, **EVALUATED), prediction_loss_only=True)
    callbacks = [EvaluateAndSaveFinalStepCallback(), Reseeded()]
    return Chronos2Trainer(model, args, train_dataset=data, eval_dataset=held_out, callbacks=callbacks)


def tsfm(folder):
    from torch.utils.data import Dataset, Subset
    from tsfm_public import TinyTimeMixerConfig, TinyTimeMixerForPrediction, TrackingCallback

    torch.manual_seed(0)
    sizes = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "num_patches": 4, "prediction_length": 4}
    config = TinyTimeMixerConfig(**sizes, d_model=8, decoder_d_model=8, num_layers=1, decoder_num_layers=1, dropout=0.0)

    class Windows(Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, row):
            values = torch.sin(torch.arange(20.0)[:, None] * (1 + row) / 9)
            return {"past_values": values[:16], "future_values": values[16:]}

    args = TrainingArguments(**options(folder, **EVALUATED))
    parts = {
        "train_dataset": Windows(),
        "eval_dataset": Subset(Windows(), range(8)),
        "callbacks": [TrackingCallback(), Reseeded()],
    }
    return Trainer(TinyTimeMixerForPrediction(config), args, **parts)


def great(folder):
    from be_great.great_dataset import GReaTDataCollator, GReaTDataset
    from be_great.great_trainer import GReaTTrainer

    rows = columns(size=lambda n: WORDS[n % 7], animal=lambda n: WORDS[2 + n % 2])
    data = GReaTDataset.from_dict(rows.to_dict())
    words = tokenizer()
    data.set_tokenizer(words)
    args = TrainingArguments(**options(folder))
    parts = {"train_dataset": data, "data_collator": GReaTDataCollator(words), "callbacks": [Reseeded()]}
    return GReaTTrainer(llama(), args, processing_class=words, **parts)


def _without_models(package, *folders):
    """Make parts of a package importable whose whole imports what is not here: models of images, a tracker, a GPU."""
    root = Path(find_spec(package).origin).parent
    for name in (package, *(f"{package}.{folder}" for folder in folders)):
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]


def _colpali(folder, data, **more):
    _without_models("colpali_engine", "trainer")
    from colpali_engine.loss import ColbertPairwiseCELoss
    from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer

    class Pairs:
        query_prefix, pos_doc_prefix, neg_doc_prefix = "query_", "doc_", "neg_doc_"

        def __call__(self, rows):
            batch = {}
            for side, prefix in (("query", self.query_prefix), ("doc", self.pos_doc_prefix)):
                tokens = tokenizer()([row[side] for row in rows], padding=True, return_tensors="pt")
                batch.update({prefix + key: value for key, value in tokens.items()})
            return batch

    torch.manual_seed(0)
    args = TrainingArguments(**options(folder), remove_unused_columns=False)
    parts = {"train_dataset": data, "eval_dataset": None, "data_collator": Pairs()}
    return ContrastiveTrainer(
        ColbertPairwiseCELoss(), False, model=_LateBert(saved_bert(folder)), args=args, **parts, **more
    )


class _LateBert(torch.nn.Module):
    """What models of late interaction return: an embedding of each token."""

    def __init__(self, path):
        super().__init__()
        self.bert = BertModel.from_pretrained(path)

    def forward(self, input_ids, attention_mask, **more):
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def _queries(first):
    return columns(query=lambda n: text(n + first, 3), doc=lambda n: text(n + first + 1, 4))


def colpali(folder):
    return _colpali(folder, _queries(0), callbacks=[Reseeded()])


def colpali_of_two_sets(folder):
    return _colpali(folder, [_queries(0), _queries(5)])


def realtabformer(folder):
    from pandas import DataFrame
    from realtabformer import REaLTabFormer
    from transformers import GPT2Config

    table = DataFrame({"size": [n * 3 % 7 for n in range(24)], "animal": [WORDS[2 + n % 2] for n in range(24)]})
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32)
    given = {**options(folder, **EVALUATED), "checkpoints_dir": folder, "tabular_config": config}
    tables = REaLTabFormer(model_type="tabular", train_size=0.7, early_stopping_patience=3, **given)
    tables.training_args_kwargs.pop("overwrite_output_dir")  # gone since transformers 5
    torch.manual_seed(0)
    tables._fit_tabular(table, device="cpu")
    tables.model = llama()  # GPT-2, its own choice, has another count of targets on transformers' Trainer
    trainer = tables._build_tabular_trainer(device="cpu", target_epochs=3)
    trainer.add_callback(Reseeded())
    return trainer


def packed_samples(folder):
    from cehrgpt.runners.sample_packing_trainer import SamplePackingTrainer

    words = tokenizer()
    data = columns(24, input_ids=lambda n: words(text(n, 4 + n % 5))["input_ids"]).train_test_split(3, shuffle=False)
    args = TrainingArguments(**options(folder, **EVALUATED))
    parts = {"train_dataset": data["train"], "eval_dataset": data["test"], "max_tokens_per_batch": 40}
    parts["data_collator"] = DataCollatorForLanguageModeling(words, mlm=False)
    return SamplePackingTrainer(model=llama(attention_dropout=0.1), args=args, callbacks=[Reseeded()], **parts)


def adaptive(folder):
    _without_models("adaptive_trainer")
    from adaptive_trainer.trainers import AdaptiveTrainer

    words = tokenizer()
    data = columns(input_ids=lambda n: words(text(n, 4 + n % 5))["input_ids"])
    args = TrainingArguments(**options(folder), remove_unused_columns=False)
    parts = {"train_dataset": data, "data_collator": DataCollatorForLanguageModeling(words, mlm=False)}
    return AdaptiveTrainer(model=llama(), args=args, top_k=3, stats_save_path=f"{folder}-stats.json", **parts)


def drafted_blocks(folder):
    _without_models("unsloth_zoo")
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from unsloth_zoo.speculative.dspark import DSparkTrainingArguments, Qwen3DSparkDrafter, UnslothDSparkTrainer

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    target = Qwen3ForCausalLM(Qwen3Config(vocab_size=32, num_key_value_heads=2, head_dim=8, **sizes))
    shape = {"num_draft_layers": 1, "block_size": 3, "num_anchors": 4, "markov_rank": 4}
    model = Qwen3DSparkDrafter.from_target(target, [0, 1], mask_token_id=31, **shape)
    words = tokenizer()
    data = columns(input_ids=lambda n: words(text(n, 6 + n % 5))["input_ids"])
    args = DSparkTrainingArguments(**options(folder, **EVALUATED), dspark_num_anchors=16)
    parts = {"train_dataset": data, "eval_dataset": data.select(range(8)), "processing_class": words}
    return UnslothDSparkTrainer(model=model, args=args, target_model=target, callbacks=[Reseeded()], **parts)


def _axolotl(folder, **more):
    from trl import RewardConfig

    sys.modules["trl.experimental.prm"] = gone = ModuleType("trl.experimental.prm")  # in this release of trl no more
    gone.PRMConfig = RewardConfig
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments
    from axolotl.utils.collators import BatchSamplerDataCollatorForSeq2Seq, DataCollatorForSeq2Seq

    words = tokenizer()
    data = columns(24, input_ids=lambda n: words(text(n, 4 + n % 5))["input_ids"])
    data = data.map(lambda row: {"labels": row["input_ids"], "attention_mask": [1] * len(row["input_ids"]),
        "position_ids": list(range(len(row["input_ids"]))), "length": len(row["input_ids"])})  # fmt: skip
    args = AxolotlTrainingArguments(**options(folder, **EVALUATED), max_seq_length=16, include_tkps=False, **more)
    collator = BatchSamplerDataCollatorForSeq2Seq if more.get("sample_packing") else DataCollatorForSeq2Seq
    parts = {"train_dataset": data, "eval_dataset": data.select(range(8)), "data_collator": collator(words)}
    parts["eval_data_collator"] = parts["data_collator"]
    return AxolotlTrainer(model=llama(), args=args, processing_class=words, **parts)


def axolotl(folder):
    return _axolotl(folder, lr_groups=[{"name": "attention", "modules": ["self_attn"], "lr": 1e-3}])


def axolotl_packed(folder):
    from axolotl.monkeypatch.data.batch_dataset_fetcher import apply_multipack_dataloader_patch

    apply_multipack_dataloader_patch()
    return _axolotl(folder, sample_packing=True, sample_packing_sequentially=True)


if __name__ == "__main__":
    main(globals()[sys.argv[1]], *sys.argv[2:])
