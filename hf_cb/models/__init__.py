"""How a model is driven, and what its generation config means for one request."""
