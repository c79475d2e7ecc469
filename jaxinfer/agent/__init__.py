"""The local agent: a model that calls tools in a loop, in the terminal and from Python."""
