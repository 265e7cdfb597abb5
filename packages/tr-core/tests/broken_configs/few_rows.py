import parts

parts.train(
    data=parts.rows(10),
    per_device_train_batch_size=16,
    dataloader_drop_last=True,
)
