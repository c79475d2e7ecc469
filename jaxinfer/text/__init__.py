"""Text: prompts to token ids, token ids to text. Never imports JAX."""
