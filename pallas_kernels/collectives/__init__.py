"""Sums and gathers over devices, each of which writes what it has into the others' memory."""
