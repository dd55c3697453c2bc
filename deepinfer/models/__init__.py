"""Networks that compute over the paged KV cache, and their weights."""
