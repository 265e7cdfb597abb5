"""Push to the Hub and resume from it; the only part that uses huggingface_hub, imported on first use."""
