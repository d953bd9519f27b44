"""Views of a run, read from its record: a table, a live view, a web page."""
