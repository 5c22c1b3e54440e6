"""The performance laboratory: timing, the ladder of modes, convolutions and training steps beside PyTorch, tables."""
