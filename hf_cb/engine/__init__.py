"""One step of generation: no threads, no text, no architecture."""
