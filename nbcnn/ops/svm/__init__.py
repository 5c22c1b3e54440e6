"""Support vector machines: rows of features on the GPU, and the solver of the pairs of classes."""
