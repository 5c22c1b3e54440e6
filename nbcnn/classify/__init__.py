"""This package trains exact RBF support vector machines on all features: 50,000 × 8,192 in minutes and under 8 GiB of host memory.

scikit-learn's `SVC(kernel="rbf")` would compute every kernel value in double precision, on one core, again and again as its
cache overflows: hours. But libsvm trains several classes one against one, and what it does for a pair of classes depends
only on the kernel values among those two. So the kernel matrix is computed once, by matrix products, and `SVC` gets the
part of each pair as a precomputed kernel: the same problems, the same solver, the same votes.

    features.py   the folder of features: its description, reading, verifying; feature_writer.py writes it
    scale.py      StandardScaler, and gamma="scale"
    processing.py steps between features and kernel (blur, root, whitening), in NumPy; gpu_processing.py has them on a GPU
    kernel.py     the kernel on the CPU: RBF, or its mean over mirrored images
    blocks.py     the kernel matrix on disk, one block per two classes
    gram.py       filling it with kernel values
    gpu.py        where a GPU is, all of it there instead: scaling, kernel matrix, pairs, sums of the votes
    workers.py    processes that solve pairs, as many as memory allows
    ovo.py        a pair, the machine of all pairs, its votes
    pipeline.py   features -> machine and predictions
    ridge.py      kernel ridge regression instead: one Cholesky factor, by our products on a GPU, else LAPACK
    classifier.py the trained classifier's file, and its use on new features and images
    report.py     accuracy, confusion matrix, tables
    pictures.py   first filters, nearest neighbours, a map of the features

Nothing is imported here, so that worker processes load neither Numba nor Matplotlib.
"""

MACHINES = {"svm": "RBF SVM", "ridge": "kernel ridge"}
"""What --machine chooses, and its name in titles."""
