"""Whole decoder layers that are recognised, and run as faster ones."""
