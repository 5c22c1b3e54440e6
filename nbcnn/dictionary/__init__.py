"""Fits layers to training images before, or instead of, training by gradients: whitening, dictionaries by k-means, first weights.

No label is ever looked at. `fit` fits what a network's layers leave to the images (`Whiten`), `start` gives convolutions first weights by k-means,
layer by layer (`nbcnn train --init kmeans`), `fit_encoder` fits the models that are nothing but dictionaries (`--model patches`).
"""
