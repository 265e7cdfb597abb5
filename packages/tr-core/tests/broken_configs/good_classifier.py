import parts

parts.train(
    eval_dataset=parts.rows(6), compute_metrics=parts.accuracy, eval_strategy="epoch", metric_for_best_model="accuracy"
)
