"""This package defines layers, losses, ready-made models, fusion, parameters and optimizers; none of it knows a device."""
