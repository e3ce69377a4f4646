"""Chips that need not be here, and their compilers."""
