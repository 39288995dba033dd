"""How attention and masks reach us during a step, and the backends that compute it over a paged KV cache."""
