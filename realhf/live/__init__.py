"""Algorithms as ordinary programs: `realhf.start`, and what calls give (docs/live.md)."""
