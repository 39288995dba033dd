"""The OpenAI-compatible HTTP server on a manager: `hf-cb serve`."""
