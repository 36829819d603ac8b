"""The HTTP server: OpenAI's completions API and the original program's route. One thread runs the model."""
