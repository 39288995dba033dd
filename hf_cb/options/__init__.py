"""What a request may ask for: from `generate`'s options, and ours, to numbers and functions that the engine takes."""
