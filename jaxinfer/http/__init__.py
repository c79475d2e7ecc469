"""The HTTP face: OpenAI-compatible routes over an EngineHandle. Never imports JAX."""
