"""Small utilities that all packages of this repository share: bad input, files, tables."""
