"""Compiled loops of the runtime."""
