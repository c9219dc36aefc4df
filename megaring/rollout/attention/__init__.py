"""Attention over paged KV, in the four layouts."""
