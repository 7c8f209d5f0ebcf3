"""Arms × seeds: what to run, running it, and what came of it."""
