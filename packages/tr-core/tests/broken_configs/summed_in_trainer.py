import parts


class Summing(parts.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss * len(inputs["labels"])
        return (loss, outputs) if return_outputs else loss


parts.train(trainer_class=Summing)
