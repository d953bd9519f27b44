"""Command lines; argument parsing and exit codes only."""
