"""Tool calls in a model's text: one file a format, all read by `ToolCallParser`."""
