"""Products of a step's tokens with a layer's weights, and what stands before and after them."""
