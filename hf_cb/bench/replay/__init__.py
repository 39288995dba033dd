"""The same arrivals against two settings or more: `hf-cb replay`."""
