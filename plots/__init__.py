"""Figures, drawn from the files that runs leave."""
