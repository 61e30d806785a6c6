"""Training of drafts, heads and speculators for a target."""
