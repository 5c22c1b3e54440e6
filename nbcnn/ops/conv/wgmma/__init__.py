"""Convolutions for Hopper: TMA fetches tiles, wgmma multiplies them; compute capability 9.0 only."""
