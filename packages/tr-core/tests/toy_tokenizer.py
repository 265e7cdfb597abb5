"""A tokenizer of whole numbers, with what the collators ask of one."""

import torch


class ToyTokenizer:
    """Knows the ids 0 to 99: 0 pads, 1 begins, 2 ends a text, 3 masks.

    Args:
        padding_side: where rows are filled.
        changes: attributes that are other than said.
    """

    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, padding_side="right", **changes):
        self.padding_side = padding_side
        self.pad_token_id, self.eos_token_id, self.mask_token_id = 0, 2, 3
        vars(self).update(changes)

    def __len__(self):
        return 100

    def get_special_tokens_mask(self, ids, already_has_special_tokens):
        assert already_has_special_tokens
        return [int(number in (0, 1, 2, 3)) for number in ids]

    def pad(self, features, return_tensors, padding=True, max_length=None, pad_to_multiple_of=None):
        assert return_tensors == "pt"
        fillers = {"input_ids": self.pad_token_id, "attention_mask": 0, "special_tokens_mask": 1}
        rows = [{"attention_mask": [1] * len(feature["input_ids"]), **feature} for feature in features]
        width = max_length if padding == "max_length" else max(len(row["input_ids"]) for row in rows)
        width = -(-width // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
        batch = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name in fillers and padding not in (False, "do_not_pad"):
                fill = [[fillers[name]] * (width - len(value)) for value in values]
                left = self.padding_side == "left"
                values = [f + list(v) if left else list(v) + f for v, f in zip(values, fill, strict=True)]
            batch[name] = torch.tensor(values)
        return batch
