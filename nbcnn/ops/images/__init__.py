"""Ops that pool, resample, gather, reorder or convert images."""
