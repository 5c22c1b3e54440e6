"""Layers, losses, ready-made models, fusion, parameters and optimizers. They know no device."""
