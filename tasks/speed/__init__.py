"""How fast, how much memory, beside what: every figure measured in one run, side by side."""
