import parts

from tr_args import ArgumentParser
from tr_core import TrainingArguments

(args,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses()
parts.Trainer(parts.Classifier(), args, train_dataset=parts.rows()).train()
