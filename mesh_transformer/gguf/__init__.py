"""Files of llama.cpp: the GGUF format."""
