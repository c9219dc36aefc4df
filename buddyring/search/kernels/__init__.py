"""The compiled parts of the search."""
