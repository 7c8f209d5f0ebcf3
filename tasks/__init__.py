"""What Lightning runs."""
