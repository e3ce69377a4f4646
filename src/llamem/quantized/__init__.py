"""Frozen matrices in blocks of four or eight bits."""
