"""The step loop and the process it runs in."""
