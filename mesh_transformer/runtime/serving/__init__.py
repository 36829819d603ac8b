"""The HTTP server: requests in OpenAI's form and in that of the original, answered by one thread that owns the model."""
