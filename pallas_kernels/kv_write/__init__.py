"""From a fused query-key-value product to queries and the KV cache."""
