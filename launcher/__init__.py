"""One process that serves the gateway and looks after a vLLM engine: starts it, restarts it, ends it."""
