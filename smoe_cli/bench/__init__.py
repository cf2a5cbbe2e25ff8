"""Measuring: programs side by side, machines, figures."""
