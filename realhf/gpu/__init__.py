"""For NVIDIA GPUs: kernels of our own in Triton, which run in its interpreter too and compile without a GPU, and copies
of small tensors."""
