"""Batch jobs: every row of a file through the engine, once, whatever interrupts them."""
