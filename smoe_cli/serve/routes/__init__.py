"""Paths to what answers them, one file for each protocol."""
