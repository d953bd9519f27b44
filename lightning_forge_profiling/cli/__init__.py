"""The `forge-profiling` command: arguments, output and exit codes."""
