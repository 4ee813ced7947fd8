"""Tests of what benchmarks compute with; `tests/docs` and `tests/e2e` run the benchmarks themselves."""
