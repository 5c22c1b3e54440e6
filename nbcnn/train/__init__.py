"""This package trains: the training loop with its callbacks, checkpoints, interrupts, logs and pictures."""
