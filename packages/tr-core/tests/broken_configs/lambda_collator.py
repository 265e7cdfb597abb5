import parts

from tr_core import default_data_collator

parts.train(
    data_collator=lambda samples: default_data_collator(samples),
    dataloader_num_workers=2,
    dataloader_multiprocessing_context="spawn",
)
