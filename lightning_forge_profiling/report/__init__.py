"""Results as text; no arithmetic here."""
