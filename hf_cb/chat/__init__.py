"""A chat in the browser: several people talk to one model, in one batch. Needs the extra `chat` (Gradio)."""
