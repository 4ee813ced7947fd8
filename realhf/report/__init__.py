"""The report of a run: one HTML file that opens anywhere, made from the files of the run directory."""
