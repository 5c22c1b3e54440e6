"""scikit-learn's interface: a convolutional autoencoder as a transformer, a convolutional classifier, and the exact RBF machine.

    from nbcnn.sklearn import ConvAutoencoder, RBFSVC
    make_pipeline(ConvAutoencoder(image_shape=(1, 28, 28)), RBFSVC()).fit(X, y).score(Xt, yt)

All three take (n, features), or images (n, C, H, W), as `X`. Every fit of a network opens the GPU of its process: with `n_jobs` > 1 several
processes share one GPU, each with the memory that its network needs, so they gain nothing there; on the CPU they take a core each.
"""

from nbcnn.files import extras

extras.need("sklearn", "nbcnn.sklearn needs")

from nbcnn.sklearn.networks import ConvAutoencoder, ConvClassifier  # noqa: E402
from nbcnn.sklearn.svc import RBFSVC  # noqa: E402

__all__ = ["RBFSVC", "ConvAutoencoder", "ConvClassifier"]
