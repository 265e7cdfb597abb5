import parts

parts.train(save_strategy="epoch", push_to_hub=True, hub_model_id="nobody/nothing")
