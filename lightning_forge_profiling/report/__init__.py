"""Results as text; no arithmetic beyond shares."""
