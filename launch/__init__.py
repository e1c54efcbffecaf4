"""Command lines: each parses, calls the package and prints."""
