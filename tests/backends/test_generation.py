"""Generate in evaluations: ranks end their rows at different times, and shards are gathered for each token."""

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration
from variants import VARIANTS, run_on, shared

from tr_core import Seq2SeqTrainer, Seq2SeqTrainingArguments

END, PADDING = 1, 0


def rows(number):
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(2, 30, (4 + i % 3,), generator=generator), "labels": torch.tensor([5 + i % 7, END])}
        for i in range(number)
    ]


def collate(batch):
    longest = max(len(row["input_ids"]) for row in batch)
    padded = torch.stack([torch.nn.functional.pad(r["input_ids"], (0, longest - len(r["input_ids"]))) for r in batch])
    return {
        "input_ids": padded,
        "attention_mask": (padded != PADDING).long(),
        "labels": torch.stack([r["labels"] for r in batch]),
    }


def trainer_of(folder, options, layers=2):
    torch.manual_seed(2)
    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": layers, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=PADDING, initializer_factor=3.0))
    model.generation_config.sequence_bias = [[[END], 16.0]]  # rows end at different times
    args = Seq2SeqTrainingArguments(
        output_dir=folder,
        predict_with_generate=True,
        per_device_eval_batch_size=2,
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        **{"use_cpu": True, "generation_max_length": 24, "max_steps": 2, **options},
    )
    return Seq2SeqTrainer(model, args, train_dataset=rows(12), eval_dataset=rows(10), data_collator=collate)


def generate(folder, options):
    trainer = trainer_of(folder, options)
    before = trainer.predict(rows(10)).predictions
    trainer.train()
    after = trainer.predict(rows(10)).predictions
    trainer.strategy.close()
    return before, after


@pytest.mark.slow
@pytest.mark.row("generation")
def test_ranks_generate_what_one_process_does(tmp_path, variant):
    backend = VARIANTS[variant]
    alone = generate(str(tmp_path / "1"), {"per_device_train_batch_size": 4})
    if "transformer_layer_cls_to_wrap" in backend.get("fsdp_config", {}):
        backend = {**backend, "fsdp_config": {"transformer_layer_cls_to_wrap": ["T5Block"]}}
    if "tp_plan" in backend:
        plan = {f"{half}.block.*.layer.*.DenseReluDense.{name}": style for half in ("encoder", "decoder")
                for name, style in (("wi", "colwise"), ("wo", "rowwise"))}  # fmt: skip
        backend = {**backend, "tp_plan": plan}
    options = shared(variant, 4, 2) | backend
    ends = {int((row == END).int().argmax()) for row in torch.as_tensor(alone[0])}
    assert len(ends) > 2  # at different times
    for rank in run_on(variant, generate, 2, str(tmp_path / "2"), options):
        for mine, theirs in zip(rank, alone, strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))
