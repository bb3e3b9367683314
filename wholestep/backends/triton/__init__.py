"""Kernels of our own in Triton, for NVIDIA GPUs. Each module is imported where Triton is there, never before."""
