"""Text in, text out: prompts to token ids, token ids to a stream of text."""
