"""What must not change: the figures and findings that were read from real traces."""
