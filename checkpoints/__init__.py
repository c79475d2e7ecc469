"""Reading and writing weights."""
