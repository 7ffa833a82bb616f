"""Fast inference."""
