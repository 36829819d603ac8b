"""Hugging Face's format: config.json with safetensors or torch files."""
