"""Documents on disk to microbatches: the corpus files, their preparation, the training order and the loader.

Everything but ``microbatch`` and ``loader`` works without torch, so that a bad corpus is refused before torch loads.
"""
