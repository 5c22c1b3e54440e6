"""What layers, losses, optimizers and schedules are made with: PyTorch's order of arguments is refused, and the refusal shows the line to write."""

import copy
import inspect
import pickle

import numpy as np
import pytest

import nbcnn
from nbcnn.nn.description import as_data, known_layers

NAMES = {name: getattr(nbcnn, name) for name in nbcnn.__all__}

LINES = {
    "Linear(3072, 10)": ["Linear(10, in_features=3072)"],
    "Linear(64, 10, False)": ["Linear(10, in_features=64, bias=False)"],
    "Conv2d(3, 16, 3)": ["Conv2d(16, 3, in_channels=3)", "Conv2d(3, 16, stride=3)"],
    "Conv2d(16, 3, 1, 1)": ["Conv2d(3, 1, in_channels=16, stride=1)", "Conv2d(16, 3, stride=1, padding=1)"],
    "Conv2d(3, 16, kernel_size=3)": ["Conv2d(16, 3, in_channels=3)"],
    "ConvTranspose2d(16, 8, 2, 2, bias=False)": [
        "ConvTranspose2d(8, 2, in_channels=16, stride=2, bias=False)",
        "ConvTranspose2d(16, 8, stride=2, padding=2, bias=False)",
    ],
    "Conv1d(4, 8, 5, padding=2)": ["Conv1d(8, 5, in_channels=4, padding=2)", "Conv1d(4, 8, stride=5, padding=2)"],
    "PointwiseConv1d(4, 8)": ["PointwiseConv1d(8, in_channels=4)"],
    "BatchNorm2d(16)": ["BatchNorm2d(channels=16)"],
    "BatchNorm2d(16, 1e-3)": ["BatchNorm2d(channels=16, eps=0.001)"],
    "InstanceNorm2d(16)": ["InstanceNorm2d(channels=16)"],
    "GroupNorm(8, 64)": ["GroupNorm(8, channels=64)"],
    "LayerNorm((3, 4, 4))": ["LayerNorm(normalized_shape=(3, 4, 4))"],
    "MaxPool2d(3, 2, 1)": ["MaxPool2d(3, 2, padding=1)"],
    "Resize(2, 'bilinear')": ["Resize(2, mode='bilinear')"],
    "SoftmaxCrossEntropy((1.0, 2.0))": ["SoftmaxCrossEntropy(weight=(1.0, 2.0))"],
    "SGD(0.1, 0.9)": ["SGD(0.1, momentum=0.9)"],
    "AdamW(0.001, 0.9, 0.99)": ["AdamW(0.001, beta1=0.9, beta2=0.99)"],
}


@pytest.mark.parametrize("call", LINES)
def test_arguments_in_another_order_are_refused_with_the_lines_to_write(call):
    with pytest.raises(nbcnn.UsageError) as caught:
        eval(call, NAMES)
    lines = str(caught.value).split(": write ")[1].split(" or ")
    assert lines == LINES[call]
    for line in lines:
        eval(line, NAMES)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("Linear(10, bias=10)", "bias must be True or False, got 10"),
        ("BatchNorm2d(eps='16')", "eps must be a number, got '16'"),
        ("Huber('mean')", "delta must be a number, got 'mean'"),
        ("Dropout(True)", "p must be a number, got True"),
        ("Clip('a')", "low must be a number or None, got 'a'"),
        ("Conv2d(8, kernal_size=3)", "no argument kernal_size; did you mean kernel_size"),
        ("Conv2d(kernel_size=3)", "Conv2d needs out_channels; its arguments are out_channels, kernel_size"),
        ("ReLU(inplace=True)", "ReLU has no argument inplace"),
        ("Softmax(1)", "Softmax takes no arguments, got 1 value"),
        ("SGD([], lr=0.1)", "lr is given twice"),
        ("RMSLE(0.0)", "RMSLE needs a positive, finite unit, got 0.0"),
        ("Conv2d(np.float64(8), 3)", "whole number of at least 1 as out_channels"),
    ],
)
def test_names_and_types_of_arguments_are_checked(call, words):
    with pytest.raises(nbcnn.UsageError, match=words):
        eval(call, NAMES | {"np": np})


def test_all_layers_losses_optimizers_and_schedules_take_at_most_two_arguments_without_a_name():
    optimizers = [nbcnn.SGD, nbcnn.Adam, nbcnn.AdamW, nbcnn.Constant, nbcnn.Cosine, nbcnn.StepDecay, nbcnn.OneCycle, nbcnn.Piecewise]
    taken = {
        kind.__name__: [name for name, each in inspect.signature(kind).parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        for kind in [*known_layers().values(), *optimizers]
    }
    assert len(taken) > 60
    assert {name: first for name, first in taken.items() if len(first) > 2} == {}


def test_numbers_of_numpy_are_taken_and_written_as_plain_ones():
    layers = [nbcnn.Conv2d(np.int64(8), (np.int32(3), 1), groups=np.int8(2)), nbcnn.GroupNorm(np.int64(2), eps=np.float32(0.5))]
    assert (layers[0].out_channels, layers[0].kernel_size) == (8, (3, 1))
    found = as_data(layers)
    assert all(type(value) in (int, float, bool, str, tuple, type(None)) for each in found for value in each.values()), found


def test_layers_and_optimizers_are_copied_and_pickled():
    for each in (nbcnn.Conv2d(4, 3, padding=1), nbcnn.Residual(nbcnn.ReLU()), nbcnn.SGD(nbcnn.Cosine(0.1)), nbcnn.MSE()):
        assert copy.deepcopy(each) == pickle.loads(pickle.dumps(each)) == each
