"""Tools to look at layouts and communication, and to check rules."""
