"""Kernels of our own for NVIDIA's GPUs, in Triton: they run in its interpreter too, and compile without a GPU."""
