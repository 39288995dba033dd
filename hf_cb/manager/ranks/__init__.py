"""A tensor-parallel model: one process drives, the others follow."""
