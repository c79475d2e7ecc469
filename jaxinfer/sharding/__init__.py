"""Logical axes to mesh axes."""
