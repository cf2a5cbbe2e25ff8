"""Vaults written back in the formats of others."""
