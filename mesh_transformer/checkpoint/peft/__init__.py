"""Folders of PEFT with adapters: adapter_config.json and adapter_model.safetensors."""
