"""GPU kernels and their references; imports nothing of jaxinfer."""
