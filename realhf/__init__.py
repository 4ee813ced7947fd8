"""realhf: plans and runs reinforcement-learning training of language models on a cluster."""

__version__ = "0.1.0"
