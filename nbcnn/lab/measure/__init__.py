"""This package measures: clocks, caches, sampling, rooflines, single ops and whole steps, results files."""
