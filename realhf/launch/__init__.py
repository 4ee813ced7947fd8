"""Starts the processes of a run, watches them, ends them: here or under SLURM."""
