"""Kernels: how they are compiled, cached, described to the GPU and launched. The sources are under ``megaring/csrc``."""
