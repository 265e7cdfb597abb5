"""Push to the Hub and go on from it; the only part that knows huggingface_hub, imported when it is used."""
