"""This module says which extra of nbcnn brings a package that is not installed; it imports neither."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = {
    "matplotlib": ("Matplotlib", "plots"),
    "sklearn": ("scikit-learn", "svm"),
    "scipy": ("SciPy", "svm"),
    "onnx": ("onnx", "onnx"),
    "torch": ("PyTorch", "torch"),
    "nccl": ("nccl4py", "nccl"),
    "numba": ("Numba-CUDA", "cu13"),
    "numba_cuda_mlir": ("numba-cuda-mlir", "mlir"),
    "cuda": ("cuda-bindings", "cu13"),
}
"""Packages that the base does without, by the name that Python imports: their names for people, and the extra."""
FOR_CUDA_12 = {"cu13": "cu12", "mlir": "mlir12"}
"""By an extra whose toolkit is CUDA 13: the one with CUDA 12, which drivers before 580 need."""
_LINE = 'pip install "nbcnn['


class PackageMissing(ImportError):
    """A package of an extra is not installed, or cannot be imported; the message has the line that installs it.

    It is an ImportError; on the command line the exit code is 1.

    Example:
        >>> import nbcnn
        >>> from nbcnn.files import extras
        >>> try:
        ...     raise extras.PackageMissing(extras.missing("sklearn"))
        ... except nbcnn.PackageMissing as error:
        ...     print(error)
        scikit-learn is not installed: pip install "nbcnn[svm]"
    """

    exit_code = 1


def line(extra: str) -> str:
    """The line that installs an extra: in a checkout, too, where nbcnn is installed from it."""
    older = f" ({FOR_CUDA_12[extra]} for drivers before 580)" if extra in FOR_CUDA_12 else ""
    return f'{_LINE}{extra}]"{older}'


def named_in(text: str) -> bool:
    """Whether a reason names such a line: then a package is what is missing."""
    return _LINE in text


def for_a_gpu(text: str) -> bool:
    """Whether a reason names the line of an extra that only kernels on a GPU need."""
    return any(f"{_LINE}{extra}]" in text for extra in FOR_CUDA_12)


def installed(name: str) -> bool:
    """Whether the package `name` of PACKAGES is installed."""
    return find_spec(name) is not None


def missing(name: str) -> str:
    """What to say where the package `name` of PACKAGES is not installed.

    Example:
        >>> from nbcnn.files import extras
        >>> extras.missing("matplotlib")
        'Matplotlib is not installed: pip install "nbcnn[plots]"'
    """
    package, extra = PACKAGES[name]
    return f"{package} is not installed: {line(extra)}"


def broken(name: str, error: BaseException) -> str:
    """What to say where importing the package `name` of PACKAGES raised `error`."""
    package, extra = PACKAGES[name]
    if not isinstance(error, ModuleNotFoundError):
        return f"{package} cannot be imported ({type(error).__name__}: {error}): {line(extra)}"
    itself = (error.name or "").split(".")[0].startswith(name)
    return missing(name) if itself else f"{package} lacks a package ({error}): {line(extra)}"


def need(name: str, what: str) -> None:
    """Raise PackageMissing if the package `name` of PACKAGES is not installed; `what` needs it, such as "pictures need"."""
    if not installed(name):
        raise PackageMissing(f"{what} {PACKAGES[name][0]}, and {missing(name)}", name=name)
