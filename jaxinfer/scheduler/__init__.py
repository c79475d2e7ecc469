"""Which sequences run in the next step, and who owns which page. Host integers only; never imports JAX."""
