"""Support vector machines: rows of features on the GPU, the mirrored kernel, and the solver of the pairs of classes."""
