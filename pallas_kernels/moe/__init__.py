"""Layers of experts, of which a router chooses some for each token."""
