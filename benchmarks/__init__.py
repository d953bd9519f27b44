"""What the package costs and whether its numbers are true, measured."""
