"""A run as its record shows it: in one table, live on a terminal, as a page."""
