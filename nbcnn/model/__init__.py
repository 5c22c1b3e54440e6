"""A network with its data's form, from Python: `network.Model` trains, predicts and is saved; the package's root exports it."""
