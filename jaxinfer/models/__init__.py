"""Models as pure functions over parameters that are declared once."""
