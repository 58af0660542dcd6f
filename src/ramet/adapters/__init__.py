"""Adapters for environments of other libraries, one module each, imported only by name."""
