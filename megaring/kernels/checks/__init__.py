"""Self-checks on a GPU: each device layer alone, then whole calls against fp64. Used by tests and by scripts."""
