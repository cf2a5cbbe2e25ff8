"""GGUF files as a source of conversions and as something to write."""
