"""This package plans: recorded steps, shapes, storage types, bounds of error. It knows neither arrays nor devices."""
