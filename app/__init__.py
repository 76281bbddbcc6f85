"""Tidegate's gateway: what gets into the engine, in which order, for how long, and what everyone else is told."""
