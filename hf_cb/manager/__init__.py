"""The background thread that drives an engine, and what its callers hold in their hands."""
