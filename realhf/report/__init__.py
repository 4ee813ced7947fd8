"""The report of a run: one HTML file that opens anywhere, made from what the run directory holds."""
