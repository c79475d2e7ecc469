"""From a step's logits to its tokens, as each row asks."""
