"""Linear attention in models that were made for another kind; each module is imported by its own name."""
