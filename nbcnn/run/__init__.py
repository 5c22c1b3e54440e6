"""This package runs a network on a device: it chooses a row, plans, compiles, trains and explains."""
