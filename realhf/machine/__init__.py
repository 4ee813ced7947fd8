"""What the machine that this process runs on has: its GPUs, its cores and its memory."""
