import parts


def first_of_pair(logits, labels):
    return logits["first"]


parts.train(eval_dataset=parts.rows(6), compute_metrics=parts.accuracy, preprocess_logits_for_metrics=first_of_pair)
