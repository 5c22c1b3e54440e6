"""`Model`: a list or a graph of layers with everything around it, so that a custom network takes a few lines."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from nbcnn.datasets.arrays import Form, Forms, form_of, one_array, seen
from nbcnn.datasets.augment import Augment, Augmentation
from nbcnn.datasets.normalisation import Normalisation
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.gpu.arrays import DeviceArray, as_device_array
from nbcnn.model import files, on_gpu
from nbcnn.model.definition import of_values, with_loss
from nbcnn.model.evaluation import evaluated, probabilities, split
from nbcnn.model.examples import batches_of, from_dataset, set_aside, targets_of, validation_of
from nbcnn.model.history import History
from nbcnn.model.step import TrainingStep
from nbcnn.model.training import Data, Past, new_folder, train
from nbcnn.model.turns import in_turn
from nbcnn.model.views import PLAIN, Views
from nbcnn.model.weights import Weights
from nbcnn.nn import models
from nbcnn.nn.graphs import Graph
from nbcnn.nn.layer import whole_number
from nbcnn.nn.optim import Optimizer, check_number, optimizer_of
from nbcnn.nn.params import INITS
from nbcnn.nn.whitening import prepared
from nbcnn.plan.graph import named
from nbcnn.run import inference
from nbcnn.run.explain import explain, summary
from nbcnn.run.net import Net
from nbcnn.run.peaks import peaks_of
from nbcnn.run.rows import check_mode
from nbcnn.train.events import Callback
from nbcnn.train.runlog import InMemory


class Shown(str):
    """A text that an interactive session shows as it is, not with its quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Model(Weights):
    """A network: layers, a loss, and the form of its data.

    layers       a list of `nbcnn.nn.layers`; sizes of inputs may be left out. Or a `Graph`; or the inputs of one, values of `nbcnn.Input`, whose
                 `outputs`, a value or a list of values that layers were called for, then follow: `Model(x, y, loss="mse")`. Several inputs or outputs
                 are tuples of arrays wherever one is an array.
    loss         "cross_entropy" (labels are classes, of images or of their pixels), "mse", "l1", "huber" or "bce" (the target is a vector, another
                 image, or the input), a loss layer such as SoftmaxCrossEntropy(label_smoothing=0.1), a function of one output and its target
                 (`nbcnn.loss` says of which kind), or None where the last layer is one or the network is only to predict. Keras's and PyTorch's
                 names mean these, too ("sparse_categorical_crossentropy", "BCEWithLogitsLoss", "mae", …). Of several outputs one
                 for all of them, or a list with one for each; they are added.
    mode         auto, cpu, naive, tiled, im2col, cudacore, tensorcore: how layers are computed; auto is the fastest that this machine has.
    precision    what multiplications round to (fp32, tf32, bf16, fp16); None is the mode's own.
    seed, init   of the first weights ("torch" or "he"); the seed also of the order of examples.
    input_shape  (C, H, W) or (F,) of an example; None takes it from the first data.
    classes      names of the classes, for pictures and files.
    fuse         put layers together where the mode has a kernel for them.
    normalisation  mean and standard deviation of the channels, `nbcnn.Normalisation.of(images)`: subtracted and divided by as pixels are read, here
                 and wherever the saved model is used; where the target of loss "mse" is the input, it is the normalised image. None divides bytes by
                 255.

    Images are uint8, of which 255 is 1, or floats, which are taken as they are (`nbcnn.Form`). A model is a context manager: `close` frees its
    GPU memory. One process trains on one GPU; several train together by `nbcnn launch` alone. Several threads may call one model: calls take turns,
    and one that comes during a `fit` waits for its end. Raises UsageError for layers, losses and names that do not go together,
    GpuUnavailable for a GPU's mode without a GPU.

    Example:
        >>> import numpy as np, nbcnn
        >>> from nbcnn import Conv2d, Flatten, Linear, MaxPool2d, ReLU
        >>> x, y = np.zeros((8, 1, 6, 6), np.uint8), np.arange(8) % 2
        >>> with nbcnn.Model([Conv2d(4, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(2)], loss="cross_entropy", mode="cpu") as model:
        ...     history = model.fit(x, y, epochs=2, batch_size=4, verbose=0)
        ...     model.predict(x).shape
        (8, 2)
    """

    def __init__(
        self,
        layers: Any,
        outputs: Any = None,
        loss: str | Any = None,
        *args: Any,
        mode: str = "auto",
        precision: str | None = None,
        seed: int = 0,
        init: str = "torch",
        input_shape: Sequence[int] | None = None,
        classes: Sequence[str] | None = None,
        fuse: bool = True,
        normalisation: Normalisation | None = None,
    ) -> None:
        given = (layers, outputs, loss, *args)
        if args or (hasattr(outputs, "build") and not hasattr(outputs, "needs_labels")):
            kinds = ", ".join(f"{type(each).__name__}(…)" for each in given if hasattr(each, "build") and not hasattr(each, "needs_labels"))
            raise UsageError(
                f"layers go into one list: Model([{kinds}], loss=…)"
                if kinds
                else "Model takes layers (or inputs and outputs) and a loss; name the others, as in mode=…"
            )
        if of_values(layers):
            layers = Graph.of(layers, () if outputs is None else outputs)
        elif outputs is not None:
            # Of a list the second argument is the loss.
            if loss is not None:
                raise UsageError("outputs belong to inputs, values of nbcnn.Input; of a list of layers the second argument is the loss")
            loss = outputs
        if callable(loss) or isinstance(loss, list | tuple):
            from nbcnn.model.declare import loss_of

            loss = loss_of(loss)
        body = with_loss(layers, loss)
        input_shape = body.input_shape if isinstance(body, Graph) and input_shape is None else input_shape
        if init not in INITS:
            raise UsageError(f"no initialisation {quoted(init)}; one of {', '.join(INITS)}{nearest(str(init), INITS)}")
        check_mode(mode, precision)
        seed = whole_number("Model", "seed", seed, least=0, below=2**63)
        super().__init__()
        self._layers, self._mode, self._precision, self._fuse = body, mode, precision, fuse
        self.seed, self.init, self.normalisation = seed, init, normalisation
        self.classes = None if classes is None else tuple(str(name) for name in classes)
        self.form: Form | Forms | None = None
        self._learnt = False
        self._encoders: dict[str, Net] = {}
        self._trained = Past()
        if input_shape is not None:
            self.build(input_shape)

    # -- what it is

    @property
    def layers(self) -> Any:
        """The list of layers, or the graph, loss included; with the sizes of their inputs once it is built."""
        held = self._net.layers if self._net else self._layers
        return held if isinstance(held, Graph) else list(held)

    @property
    def loss(self) -> Any:
        """The loss layer, None without one."""
        return self._layers[-1] if hasattr(self._layers[-1], "needs_labels") else None

    @in_turn
    def build(self, shape: Sequence[int]) -> Self:
        """Make the network for examples of `shape`, (C, H, W) or (F,), with its first weights. Returns the model.

        Raises UsageError if it is built for another shape, ShapeError (a UsageError's sibling, exit code 2) naming the layer that does not fit.
        """
        try:
            sizes = tuple(whole_number("Model", "input_shape", n) for n in shape)
        except (TypeError, UsageError):  # no sequence, or one of other things
            sizes = ()
        if len(sizes) not in (1, 3):
            raise UsageError(f"an example is (C, H, W) or (F,), each a whole number of at least 1, got {quoted(shape)}")
        shape = sizes
        if self._net is not None:
            if self._net.input_shape != shape:
                raise UsageError(f"the network is built for {self._net.input_shape}, not for {shape}")
            return self
        options: dict[str, Any] = {"fusing": self._fuse, "seed": self.seed, "init": self.init, "normalisation": self.normalisation}
        self._closed = False
        net = Net(self._layers, shape, mode=self._mode, precision=self._precision, **options)
        if self.classes and net.takes_classes and len(self.classes) != net.classes:
            net.close()
            raise UsageError(f"classes names {len(self.classes):,} classes, and the network's output has {net.classes:,}")
        self._net = net
        inputs = self._net.layers.inputs if isinstance(self._net.layers, Graph) else [shape]
        self.form = self.form or (Form(shape) if len(inputs) == 1 else Forms(tuple(map(Form, inputs))))
        self._meet_factors()
        return self

    def learn(self, form: Form | Forms) -> None:
        """Take examples of `form`, instead of the form of the first data."""
        self.form, self._learnt = form, True

    @in_turn
    def summary(self) -> Shown:
        """Layers, shapes of their outputs without the batch, parameters; as text. Raises UsageError before it is built."""
        net = self.net
        frozen = len(self.frozen())
        note = f"\n{frozen} of {len(net.params.layout.names)} parameters frozen" if frozen else ""
        form = f"\nexamples: {self.form.words()}" if self._learnt and self.form else ""
        return Shown(f"{summary(net.layers, net.input_shape)}{note}{form}\n{net.mode} {net.precision} on {net.device_name} ({net.why})")

    @in_turn
    def explain(self, batch_size: int = 256) -> Shown:
        """Every step of the plan of a batch's forward and backward pass: op, shapes, kernel, flops, bytes, floor; as text."""
        net, batch_size = self.net, whole_number("explain", "batch_size", batch_size)
        plan = net.lower(net.record_gradients(batch_size) if self.loss else net.record_predict(batch_size))
        peak = "fp32 split" if net.mode == "tensorcore" and net.precision == "fp32" else net.precision
        return Shown(explain(plan, peak, peaks_of(net.device, net.row)))

    def __repr__(self) -> str:
        kinds = ", ".join(type(layer).__name__ for layer in self._layers)
        if self._net is None:
            return f"<Model [{kinds}], not built>"
        shape = "×".join(map(str, self._net.input_shape))
        return f"<Model [{kinds}], {shape}, {self._net.params.count:,} parameters, {self._net.mode} {self._net.precision}>"

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(self.summary() if self._net else repr(self))}</pre>"

    # -- training

    @in_turn
    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        optimizer: Optimizer | str | None = None,
        validation_data: Any = None,
        validation_split: float = 0.0,
        callbacks: Sequence[Callback] = (),
        run: Path | str | None = None,
        flip: bool = False,
        augment: Augment | Augmentation | type[Augmentation] | str = "",
        shuffle: bool = True,
        steps_per_epoch: int | None = None,
        channels_last: bool | None = None,
        verbose: int | bool = 1,
        accumulate: int = 1,
        ema: float = 0.0,
        recompute: bool = False,
    ) -> History:
        """Train; a second call goes on from the first one's weights, and from the optimizer's state if that is of the same kind.

        x, y             examples and what the network is to make of them. For the loss "cross_entropy" y is one class per image (N,), or one per
                         pixel (N, H, W) where the output is (classes, H, W): whole numbers from 0, or one-hot. For "mse" y is what the output is
                         to be: vectors (N, F) of floats as they are, or images, of which a byte of 255 is 1; without y the target is x itself.
                         x and y may lie on the GPU, as C-contiguous arrays of PyTorch, CuPy or JAX, and are then trained on where they lie: x uint8
                         or float32 (N, …), taken as it is; of y classes are checked on the host, and values are read on the GPU. They must not
                         be written to meanwhile. Validation data is copied to the host.
                         Or x is a data set of `nbcnn.datasets`, which brings its labels, or its masks for an output (classes, H, W), the names
                         of its classes, and, as validation data, its test images.
                         Or x is a callable: x(epoch), of epoch 0, 1, …, starts an epoch and returns its batches, each (x, y), or x alone where
                         there is no y. Batches are trained on as they come, none is shuffled; all have one size but for the last of an epoch. A
                         thread reads them ahead, in order.
        epochs           passes over the examples.
        batch_size       examples per training step; None is 64. Where there are fewer examples it is all of them, with a warning if a number was
                         given. A callable's batches have their own.
        optimizer        `SGD(lr=…)`, `Adam(lr=…)`, `AdamW(lr=…)`, or one of your own (`nbcnn.optimizer`); "sgd", "adam" and "adamw" are these with
                         the learning rates that are their own; None is SGD().
        validation_data  (x, y), or x for "mse", or a data set, of which the test images count: evaluated after every epoch, never trained on.
        validation_split  the share of x and y, more than 0 and less than 1, that is set aside as validation data: the last examples, before any are
                         shuffled, as Keras does it. Of arrays; data that are sorted by class are to be shuffled first.
        callbacks        of `nbcnn.Callback`: reading, epoch, end, close. One that raises ends the training with CallbackError.
        run              a new folder for config.json, metrics, checkpoints and pictures, as train.py makes them; None writes nothing.
        flip             mirror each image with probability 1/2.
        augment          what else is done at random to training images, as `nbcnn train --augment`: "flip:alternate,crop:4,cutout:8", or
                         "crop:4:reflect", by reflected borders; or one of your own (`nbcnn.augmentation`), alone or by its name among the words.
                         What moves the pixels of an image moves those of a target that is one.
        shuffle          take the examples of every epoch in a new order; False takes them as they come.
        steps_per_epoch  batches of an epoch of a callable; None is len(x(epoch)).
        channels_last    whether images are (N, H, W, C); None finds out, and refuses what could be both.
        verbose          0: no progress on stderr.
        accumulate       batches whose gradients are added up before one update of the weights: so many times the effective batch, at the
                         memory cost of one. Steps, and so learning rates, count updates. Not for a callable, which yields larger batches
                         itself.
        ema              decay of an exponential moving average of the weights, such as 0.999; less than 1. The network is evaluated and saved by
                         the average and keeps it afterwards; a later fit goes on from it. 0 keeps none.
        recompute        make the outputs of BatchNorm2d again in the backward pass instead of keeping them since the forward pass: the same bits in
                         less memory, 0.69 of it for `resnet18` at batch 512 in bf16, and in more time. Where that would save none, nothing is.

        Ctrl-C ends it after the present step, and the history so far comes back with `interrupted`. Raises UsageError for what does not
        fit, MemoryPlanError before anything large is allocated, Diverged (the weights are then the last finite ones). Warns (UserWarning) of floats
        much larger than 1, and where the training loss after two epochs or more is no less than that of giving all examples the same answer.
        """
        if self.loss is None:
            raise UsageError('the network has no loss: Model(layers, loss="cross_entropy") or loss="mse"')
        epochs, accumulate = whole_number("fit", "epochs", epochs), whole_number("fit", "accumulate", accumulate)
        check_number("fit", "ema", ema, below=1.0)
        if not isinstance(recompute, bool):
            raise UsageError(f"fit: recompute is True or False, not {quoted(recompute)}")
        if batch_size is not None:
            batch_size = whole_number("fit", "batch_size", batch_size)
        optimizer = optimizer_of(optimizer)
        check_number("fit", "validation_split", validation_split, below=1.0)
        if validation_split:
            graph = self._layers if isinstance(self._layers, Graph) else None
            several = (len(graph.inputs) > 1, len(graph.outputs) > 1) if graph else (False, False)
            x, y, validation_data = set_aside(x, y, validation_data, validation_split, several)
        augment = Augment.of(augment)
        images: Any
        batches = None
        if callable(x) and not hasattr(x, "__array__"):
            if y is not None:
                raise UsageError("x is a callable, whose batches bring their y: leave y out")

            def learn(examples: Any) -> tuple[Net, Form | Forms]:
                form = self.learn_from(examples, channels_last)
                return self.build(form.shape).net, form

            images, targets, batches = batches_of(x, self._trained.epochs, batch_size, steps_per_epoch, learn, channels_last)
            name = files.CALLABLE
        else:
            if hasattr(x, "__iter__") and not isinstance(x, Sequence) and not hasattr(x, "__array__") and not hasattr(x, "train_images"):
                raise UsageError(
                    f"examples are an array or a list of arrays, not {type(x).__name__}. What yields batches is given as a callable, which starts an "
                    "epoch: fit(lambda epoch: loader), of a DataLoader of PyTorch, too; steps_per_epoch=… where it has no len()"
                )
            if steps_per_epoch is not None:
                raise UsageError("steps_per_epoch is for a callable; arrays have as many steps as batches: leave it out")
            if hasattr(x, "train_images"):  # whether its labels or its masks are wanted follows from the network's output
                self.build(self.learn_from(x.train_images, channels_last).shape)
                self._take_classes(x)
            x, y, validation_data = on_gpu.device_arrays(x, y, validation_data)
            x, y, validation_data, name = from_dataset(x, y, validation_data, self.loss.needs_labels, self._of_pixels())
            if isinstance(x, DeviceArray):
                images, name = self.learn_on_gpu(x, channels_last), files.ON_GPU
            else:
                images = self.learn_from(x, channels_last).take(x, channels_last)
                self.build(images.shape[1:])
            targets = targets_of(self.net, y, x, len(images), channels_last)
        assert self.form is not None
        test_images, test_targets = validation_of(self.net, self.form, validation_data, channels_last)
        if verbose and not self._trained.epochs:
            print(f"trained on {self.form.words()}", file=sys.stderr, flush=True)
        with ExitStack() as held:
            held.enter_context(self._trains())
            return train(
                self,
                Data(images, targets, test_images, test_targets, batches, name),
                self._trained,
                epochs=epochs,
                batch_size=batch_size,
                optimizer=optimizer,
                factors=self._factors,
                callbacks=callbacks,
                folder=InMemory() if run is None else new_folder(run, held),
                options={
                    **{"flip": flip, "augment": augment, "shuffle": shuffle},
                    **{"accumulate": accumulate, "ema": float(ema), "recompute": recompute},
                },
                verbose=verbose,
            )

    @in_turn
    def step(self, optimizer: Optimizer | str | None = None, *, steps: int = 1, steps_per_epoch: int = 1) -> TrainingStep:
        """A training step for a loop of your own, whose loss any program may make: `forward`, `backward`, `update` (`TrainingStep`).

        optimizer  as `fit` takes it. steps, steps_per_epoch  what a schedule of learning rates is laid over; after the last step the last rate
                   holds, and a plain number needs neither.
        The model's own loss takes no part. Raises UsageError before the network is built, for a network with several inputs, for layers that draw
        random numbers (Dropout), and in precision fp16, which scales the loss.

        Example, with the mean squared error as the loss:
            >>> import numpy as np, nbcnn
            >>> x, t = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
            >>> model = nbcnn.Model([nbcnn.Linear(2)], mode="cpu").build((3,))
            >>> step = model.step(nbcnn.SGD(lr=0.1, momentum=0))
            >>> losses = []
            >>> for _ in range(30):
            ...     y = step.forward(x)
            ...     losses.append(float(((y - t) ** 2).mean()))
            ...     step.backward(2 * (y - t) / y.size)
            ...     step.update()
            >>> losses[-1] < 0.01 * losses[0]
            True
        """
        steps, steps_per_epoch = whole_number("step", "steps", steps), whole_number("step", "steps_per_epoch", steps_per_epoch)
        return TrainingStep(self, optimizer_of(optimizer), self._factors, steps, steps_per_epoch)

    def _take_classes(self, data: Any) -> None:
        """Take the names of the classes of a data set, unless the model has some: of its masks where the network classifies pixels."""
        named = data.masks if self._of_pixels() else data
        if self.classes is None and self.net.takes_classes and named is not None and len(named.classes or ()) == self.net.classes:
            self.classes = tuple(named.classes)

    def learn_from(self, x: Any, channels_last: bool | None) -> Form | Forms:
        """The form of examples, from `x` if they are the first."""
        if not self._learnt and isinstance(self.form, Forms):
            self.form.take(x, channels_last)  # says what is wrong with them
            pairs = enumerate(zip(self.form.parts, x, strict=True), 1)
            self.learn(Forms(tuple(form_of(each, channels_last, part.shape, f"examples of input {at}") for at, (part, each) in pairs)))
        elif not self._learnt:
            self.form = form_of(x, channels_last, self._net.input_shape if self._net else None)
            self._learnt = True
        assert self.form is not None
        return self.form

    def learn_on_gpu(self, x: DeviceArray, channels_last: bool | None) -> DeviceArray:
        """Examples that lie on the GPU, checked; the network is built, and learns their form, if they are the first."""
        if not self._learnt and not isinstance(self.form, Forms):
            self.learn(on_gpu.form_on_gpu(x, self._net.input_shape if self._net else None))
        assert self.form is not None
        made = on_gpu.examples(x, self.form, channels_last)
        on_gpu.must_be_there(self.build(made.shape[1:]).net)
        return made

    # -- what it knows

    @in_turn
    def predict(self, x: Any, *, batch_size: int = 256, channels_last: bool | None = None, views: str | Views = "") -> Any:
        """The network's output for examples or a single one, float32 (N, …): logits, reconstructions in 0..1, whatever its last layer makes.

        views  average the outputs over views of each image: "flip" adds its mirror image, which counts as much; "shift:1" adds the image moved by
               one pixel down and right, and up and left, its borders reflected, which together count as much as the image in its place; or both,
               "flip,shift:1", which costs six predictions. For outputs that are vectors.
        Of several outputs a tuple of arrays. Examples that lie on the GPU, (N, …) as a C-contiguous array of PyTorch, CuPy or JAX, uint8 or float32,
        are read there, and the output is a `nbcnn.gpu.arrays.DeviceArray`, which those take without a copy; with `views` they are copied to the
        host. Raises UsageError for arrays of another form, for views that do not fit, or before the network is built.
        """
        return self._outputs(self.net, x, batch_size, channels_last, Views.parse(views))

    def _outputs(self, net: Net, x: Any, batch_size: int, channels_last: bool | None, views: Views = PLAIN) -> Any:
        batch_size = whole_number("predict", "batch_size", batch_size)
        assert self.form is not None
        x = as_device_array(x, "examples")
        if isinstance(x, DeviceArray) and views != PLAIN:
            x = np.asarray(x)
        if isinstance(x, DeviceArray):
            on_gpu.must_be_there(net)
            return inference.on_gpu(net, on_gpu.examples(x, self.form, channels_last), batch_size)
        if isinstance(self.form, Form) and not (given := one_array(x, "examples")).size:
            raise UsageError(f"there is nothing to predict: the array is {given.shape}")
        return split(views.predict(net, self.form.take(x, channels_last), batch_size), net.output_shapes)

    @in_turn
    def predict_proba(self, x: Any, *, batch_size: int = 256, channels_last: bool | None = None, views: str | Views = "") -> np.ndarray:
        """The probability of every class, float32 (N, classes), or of pixels (N, classes, H, W), whose sum is 1. Of `views` the outputs are averaged.

        Raises UsageError unless the loss is cross_entropy.
        """
        self._classifies("predict_proba")
        return probabilities(self.net, np.asarray(self.predict(x, batch_size=batch_size, channels_last=channels_last, views=views)))

    @in_turn
    def predict_classes(self, x: Any, *, batch_size: int = 256, channels_last: bool | None = None, views: str | Views = "") -> np.ndarray:
        """The most probable class of every example, int64 (N,), or of every pixel, (N, H, W); of `views` of the mean logits.

        Raises UsageError unless the loss is cross_entropy.
        """
        self._classifies("predict_classes")
        return np.asarray(self.predict(x, batch_size=batch_size, channels_last=channels_last, views=views)).argmax(1)

    def _classifies(self, what: str) -> None:
        if not self.net.takes_classes:
            raise UsageError(f'{what} is for networks that classify (loss="cross_entropy"); predict gives the output of this one')
        if len(self.net.output_shapes) > 1:
            raise UsageError(f"{what} is for networks with one output; predict gives a tuple of all outputs of this one")

    @in_turn
    def evaluate(
        self, x: Any, y: Any = None, *, batch_size: int = 256, channels_last: bool | None = None, views: str | Views = ""
    ) -> dict[str, float]:
        """The mean loss over the examples, and for classes the accuracy: {"loss": …, "accuracy": …}, of pixels also their mean intersection over
        union by class, "iou". Nothing is changed.

        The loss is summed in float64 from the network's float32 outputs; of ignored labels neither counts. `views` as in `predict`.
        Raises UsageError as `predict`, for labels that do not fit, and for a custom loss without a method measure(outputs, targets) that gives
        the sum of losses and what it counts.
        """
        if self.loss is None:
            raise UsageError("the network has no loss to evaluate")
        net, batch_size = self.net, whole_number("evaluate", "batch_size", batch_size)
        x, y, _ = on_gpu.device_arrays(x, y, None)
        y = np.asarray(y) if isinstance(y, DeviceArray) and y is not x else y
        x, y, *_ = from_dataset(x, y, None, self.loss.needs_labels, self._of_pixels(), test=True)
        assert self.form is not None
        images = self.form.take(x, channels_last)
        if not len(images):
            raise UsageError("there is nothing to evaluate: no examples")
        targets = targets_of(net, y, x, len(images), channels_last)
        return evaluated(net, images, targets, batch_size, lambda part: self._prepared(part, batch_size), Views.parse(views))

    def _of_pixels(self) -> bool:
        """Whether it has one output, an image. Raises UsageError before it is built."""
        return self._net is not None and len(self.net.output_shapes) == 1 and bool(self.net.plane)

    def _prepared(self, images: np.ndarray, batch: int) -> np.ndarray:
        """What an autoencoder is to give back of `images`: what it sees of them, as the layers in front that prepare it leave it."""
        first, _ = prepared(named(self.net.layers))
        if first:
            return self._encoder(first[-1][0]).predict(images, batch)
        return self.normalisation.done(images) if self.normalisation else seen(images)

    @in_turn
    def features(self, x: Any, at: str, *, batch_size: int = 256, channels_last: bool | None = None) -> Any:
        """The output of the layer `at` (conv1, relu1, pool1, …, as `summary` names them), float32 (N, …), for examples as `predict` takes them.

        Raises UsageError for another name.
        """
        return self._outputs(self._encoder(at), x, batch_size, channels_last)

    def _encoder(self, at: str) -> Net:
        """The network up to the layer `at`, with the present weights."""
        net = self.net
        if at not in self._encoders:
            options: dict[str, Any] = {"precision": net.precision, "fusing": self._fuse, "normalisation": self.normalisation}
            made = Net(models.encoder(net.layers, at), net.input_shape, mode=self._mode, **options)
            self._encoders[at] = made
        encoder = self._encoders[at]
        weights = net.params.as_dict()
        encoder.params.load_dict({name: weights[name] for name in encoder.params.names})
        return encoder

    # -- files

    @in_turn
    def save(self, path: Path | str) -> Path:
        """Write the network into one safetensors file: weights, layers, input's shape and form, class names, precision, versions.

        The file is put in place whole or not at all. `nbcnn.load` makes the model of it again. A name without the suffix gets it: the path that comes
        back is the file's. Raises UsageError for the suffix of another format (.h5, .pt, .onnx, …), OSError if it cannot be written.
        """
        return files.save(self, Path(path))

    # -- memory

    @in_turn
    def close(self) -> None:
        """Let the memory of the network go, on a GPU its GPU memory. The model can be saved or used no more."""
        for net in (self._net, *self._encoders.values()):
            if net:
                net.close()
        net = None
        self._closed = True
        self._net, self._encoders, self._trained = None, {}, Past()
        gc.collect()

    @in_turn
    def __getstate__(self) -> dict[str, Any]:
        """For pickle, copy and joblib: the description and the weights; the optimizer's state is not kept."""
        made = {name: value for name, value in super().__getstate__().items() if name not in ("_net", "_encoders", "_trained")}
        held = None if self._net is None else (self._net.input_shape, self._net.precision, self._net.params.as_dict())
        return made | {"held": held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the network again, on a machine that may have another mode."""
        held = state.pop("held")
        super().__setstate__({"_closed": False} | state | {"_net": None, "_encoders": {}, "_trained": Past()})
        if held:
            shape, precision, weights = held
            choice = files.choice_of(self._mode if self._mode == "cpu" else "auto", None, precision)
            self._mode, self._precision, factors = choice.row.mode, choice.row.precision, self._factors
            self._factors, self._wanted = {}, []
            self.build(shape).net.params.load_dict(weights)
            self._factors = factors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
