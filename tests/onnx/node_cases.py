"""The node cases of ONNX that a framework for convolutional networks is asked for: which they are, and how one is run.

A case is one of `onnx.backend.test` whose model is a single node of `OPS`. Its first input is an example, or a batch of them; what the op needs as a
constant (weights, axes, shapes) is given as one, though the case has it as an input. First axes count examples; where that cannot be, because the
node mixes them, the inputs are one example as a whole ("whole" in the table).
"""

from __future__ import annotations

import warnings

import numpy as np

OPS = (
    *("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool"),
    *("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization", "LRN"),
    *("MeanVarianceNormalization", "LpNormalization", "RMSNormalization"),
    *("Relu", "LeakyRelu", "PRelu", "Elu", "Celu", "Selu", "Sigmoid", "HardSigmoid", "HardSwish", "Swish", "Mish", "Softplus", "Softsign"),
    *("Gelu", "Tanh", "ThresholdedRelu", "Clip", "Softmax", "LogSoftmax", "Abs", "Neg", "Exp", "Sqrt", "Reciprocal"),
    *("Gemm", "MatMul", "Add", "Sub", "Mul", "Div", "Pow", "Sum", "Mean", "Max", "Min", "ReduceMean"),
    *("Concat", "Split", "Slice", "Pad", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Identity", "Dropout"),
    *("Resize", "Upsample", "DepthToSpace", "SpaceToDepth", "Tile", "ReduceMax", "ReduceMin", "Where"),
    *("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"),
)
"""The ops whose cases are counted."""
BOTH = ("Add", "Sub", "Mul", "Div", "Sum", "Mean", "Concat", "Max", "Min")
"""Ops whose further operands are examples, too."""
LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


def collected():
    """The cases, by name: (model, inputs by name, outputs, rtol, atol)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    return {case.name: case for case in cases if len(case.model.graph.node) == 1 and case.model.graph.node[0].op_type in OPS}


def run(model, data_sets, rtol, atol):
    """ "batched" or "whole" if the case is right, else the reason. Raises AssertionError for another result."""
    from nbcnn.onnx.errors import OnnxError

    reasons = []
    for batched in (True, False):
        try:
            _run(model, data_sets, rtol, atol, batched)
        except OnnxError as error:
            reasons.append(_reason(error))
        else:
            return "batched" if batched else "whole"
    return reasons[0] if "batched=False" not in reasons[0] and "counts examples" not in reasons[0] else reasons[1]


def _reason(error):
    """What an error says of the node."""
    lines = getattr(error, "reasons", [])
    text = lines[0] if lines else str(error)
    return text.split(": ", 1)[1]


def _run(model, data_sets, rtol, atol, batched):
    from nbcnn.onnx.importer import imported

    node = model.graph.node[0]
    names = [each.name for each in model.graph.input]
    for inputs, outputs in data_sets:
        given = dict(zip(names, map(np.asarray, inputs), strict=True))
        examples = [name for name in node.input if name in given and (name == node.input[0] or node.op_type in BOTH)]
        labels = node.input[1] if node.op_type in LOSSES else ""
        constants = {name: array for name, array in given.items() if name not in (*examples, labels)}
        # An example of no axes cannot be told from none; and a batch of vectors and one of scalars do not go together.
        made = imported(model, constants=constants, batched=batched, mode="cpu")
        with made.model as network:
            arrays = [given[name].reshape(-1 if batched else 1, *each) for name, each in zip(made.inputs, network.net.layers.inputs, strict=True)]
            found = network.predict(arrays[0] if len(arrays) == 1 else tuple(arrays))
            found = list(found) if isinstance(found, tuple) else [found]
            by_name = dict(zip(made.outputs, found, strict=True))
            for each, wanted in zip(model.graph.output, outputs, strict=True):
                wanted = np.asarray(wanted)
                if labels and each.name == node.output[0]:
                    target = given[labels].reshape(len(arrays[0]), *network.net.plane).astype(np.int64)
                    value = np.float32(network.evaluate(arrays[0], target)["loss"])
                    np.testing.assert_allclose(value, wanted, rtol=rtol, atol=atol)
                    continue
                assert wanted.shape == (*((len(arrays[0]),) if batched else ()), *made.outputs[each.name]), each.name
                np.testing.assert_allclose(by_name[each.name].reshape(wanted.shape), wanted, rtol=rtol, atol=atol)
