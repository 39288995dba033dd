"""Faster modules: what a model's layers are, told from the modules themselves and verified against them."""
