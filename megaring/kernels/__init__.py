"""Kernels: how they are compiled, cached, given arguments and launched. Sources are in ``megaring/csrc``."""
