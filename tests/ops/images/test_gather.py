"""Tests of gather: Philox against its published vectors, batches against a loop over images, kernels against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.check.one_op import Bound, run_op
from nbcnn.gpu.device import Host
from nbcnn.gpu.language import jit
from nbcnn.modes import named
from nbcnn.ops.images import gather
from nbcnn.ops.kernel.call import host
from nbcnn.ops.update import random
from nbcnn.ops.update.advance import EPOCH, POSITION, SEED

# (counter, key, output) of philox4x32-10 in tests/kat_vectors of Random123 1.14, https://github.com/DEShawResearch/random123
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@jit()
def philox_kernel(inputs, words):
    """words = Philox4x32-10 of inputs (4 counter words, 2 key words), one thread."""
    a, b, c, d = random.philox_words(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], inputs[5])
    words[0], words[1], words[2], words[3] = a, b, c, d


@pytest.fixture(params=["reference", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("NCHW kernel", "NHWC kernel"))])
def run(request):
    """run(op, ins, outs): the outputs of the reference, or of the kernel in one of the layouts of a GPU row."""

    def with_impl(op, ins, outs, **options):
        if request.param == "reference":
            return run_op(host(getattr(gather, str(op))), op, ins, outs, device=Host(), **options)
        impl = {"gather": gather.OPS[named("gather")], "gather_labels": gather.OPS[named("gather_labels")]}[op]
        layout = request.param.split()[0]
        return run_op(impl, op, ins, outs, device=request.getfixturevalue("device"), layout=layout, **options)

    return with_impl


def state_at(position=0, epoch=0, seed=0):
    state = np.zeros(8, np.int64)
    state[[POSITION, EPOCH, SEED]] = position, epoch, seed
    return state


def data(rng, count, shape):
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    return images, rng.permutation(count).astype(np.int32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert tuple(int(word) for word in random.philox4x32(counter, key)) == expected


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers_in_a_kernel(device, counter, key, expected):
    inputs, words = device.empty(6, "uint32"), device.empty(4, "uint32")
    device.upload(inputs, np.array([*counter, *key], np.uint32))
    philox_kernel[1, 1, device.stream](inputs, words)
    assert tuple(int(word) for word in device.download(words)) == expected


def test_philox_of_arrays_is_philox_of_their_elements():
    first, second = np.arange(7, dtype=np.uint32)[:, None], np.arange(3, dtype=np.uint32)
    words = random.philox4x32((first, second, 5, 6), (7, 8))
    assert all(word.shape == (7, 3) and word.dtype == np.uint32 for word in words)
    assert [int(word[4, 2]) for word in words] == [int(word) for word in random.philox4x32((4, 2, 5, 6), (7, 8))]


@pytest.mark.parametrize(("seed", "key"), [(1, (1, 0)), (5 << 32 | 3, (3, 5)), (-1, (0xFFFFFFFF, 0xFFFFFFFF)), (-(1 << 63), (0, 0x80000000))])
def test_key_is_the_two_words_of_the_seed(seed, key):
    assert random.key_of(seed) == key


# Volumes that four divides and one that it does not; 1,200 elements are more than one block's.
@pytest.mark.parametrize("shape", [(3, 4, 4), (3, 3, 5), (1, 30, 40), (4, 1, 1)])
def test_batch_holds_the_ordered_images_over_255(run, rng, shape):
    images, order = data(rng, 6, shape)
    (x,) = run("gather", [images, order, state_at(position=2)], [((3, *shape), "float32")])
    for i in range(3):
        np.testing.assert_array_equal(x[i], images[order[2 + i]].astype(np.float32) * np.float32(1 / 255))


@pytest.mark.parametrize("shape", [(3, 4, 4), (3, 3, 5)])
def test_flip_mirrors_the_images_whose_coin_is_set(run, rng, shape):
    images, order = data(rng, 9, shape)
    seed, epoch = (0x1234 << 32) + 99, 3
    (x,) = run(
        "gather",
        [images, order, state_at(position=1, epoch=epoch, seed=seed)],
        [((8, *shape), "float32")],
        attrs={"flip": True},
    )
    coins = [int(random.philox4x32((int(index), epoch, 0, 0), (99, 0x1234))[0]) & 1 for index in order[1:9]]
    assert set(coins) == {0, 1}
    for got, index, coin in zip(x, order[1:9], coins, strict=True):
        plain = images[index].astype(np.float32) * np.float32(1 / 255)
        np.testing.assert_array_equal(got, plain[:, :, ::-1] if coin else plain)


def test_255_becomes_exactly_1(run):
    images = np.full((1, 1, 2, 2), 255, np.uint8)
    (x,) = run("gather", [images, np.zeros(1, np.int32), state_at()], [((1, 1, 2, 2), "float32")])
    np.testing.assert_array_equal(x, 1)


def test_coins_are_fair_and_change_with_the_epoch_and_the_seed():
    index = np.arange(10_000, dtype=np.int32)
    coins = gather.mirrored(index, state_at(epoch=0, seed=1))
    # Five standard deviations of a fair coin are 250 of 10,000; for agreement of independent coins likewise.
    assert abs(int(coins.sum()) - 5000) < 250
    for other in (state_at(epoch=1, seed=1), state_at(epoch=0, seed=2)):
        assert abs(int((coins == gather.mirrored(index, other)).sum()) - 5000) < 250


def test_coin_of_an_image_does_not_depend_on_its_place_in_the_order(rng):
    index = rng.permutation(100).astype(np.int32)
    np.testing.assert_array_equal(gather.mirrored(index, state_at(seed=4)), gather.mirrored(np.arange(100), state_at(seed=4))[index])


def test_data_set_is_left_as_it_was(run, rng):
    images, order = data(rng, 5, (1, 2, 4))
    before = images.copy()
    run("gather", [images, order, state_at()], [((5, 1, 2, 4), "float32")], attrs={"flip": True})
    np.testing.assert_array_equal(images, before)


def test_labels_follow_the_same_order(run, rng):
    labels = rng.integers(0, 10, 300).astype(np.int32)
    order = rng.permutation(300).astype(np.int32)
    (y,) = run("gather_labels", [labels, order, state_at(position=20)], [((270,), "int32")])
    np.testing.assert_array_equal(y, labels[order[20:290]])


def test_real_batch_equals_the_reference_bit_for_bit(gpu, rng):
    images, order = data(rng, 2048, (3, 32, 32))
    state = state_at(position=512, epoch=7, seed=11)
    expected = np.empty((1024, 3, 32, 32), np.float32)
    gather.gather(images, order, state, expected, flip=True)
    for layout in ("NCHW", "NHWC"):
        outs = [((1024, 3, 32, 32), "float32")]
        (x,) = run_op(gather.OPS[named("gather")], "gather", [images, order, state], outs, device=gpu, attrs={"flip": True}, layout=layout)
        np.testing.assert_array_equal(x, expected)


AUGMENTED = [{"flip": flip, "crop": crop, "cutout": cutout} for flip in (False, True, "alternate") for crop, cutout in ((2, 0), (0, 3), (4, 2))]
AUGMENTED += [{"flip": flip, "crop": 4, "cutout": 2, "reflect": True} for flip in (False, True)]


@pytest.mark.parametrize("attrs", AUGMENTED, ids=lambda attrs: "-".join(map(str, attrs.values())))
def test_augmentation_is_the_definition_pixel_by_pixel(rng, attrs):
    shape, position, epoch, seed = (2, 5, 6), 1, 3, (7 << 32) + 5
    images, order = data(rng, 40, shape)
    state = state_at(position, epoch, seed)
    x = np.empty((39, *shape), np.float32)
    gather.gather(images, order, state, x, **attrs)
    _, H, W = shape
    seen = set()
    for got, index in zip(x, order[position:], strict=True):
        a, b, c, d = (int(word) for word in random.philox4x32((int(index), epoch, 1, 0), (5, 7)))
        crop, side = attrs["crop"], attrs["cutout"]
        down, right = ((word * (2 * crop + 1) >> 32) - crop for word in (a, b))
        top, left = ((word * extent >> 32) - side // 2 for word, extent in ((c, H), (d, W)))
        mirror = bool(gather.mirrored(np.array([index]), state, attrs["flip"])[0]) if attrs["flip"] else False
        seen.add((down, right, top, left, mirror))
        expected, source, reach = np.zeros(shape, np.float32), images[index], 0
        if attrs.get("reflect"):
            reach = crop
            source = np.pad(source, ((0, 0), (reach, reach), (reach, reach)), mode="reflect")
        for h in range(H):
            for w in range(W):
                row, column = h + down, (W - 1 - w if mirror else w) + right
                if -reach <= row < H + reach and -reach <= column < W + reach and not (top <= h < top + side and left <= w < left + side):
                    expected[:, h, w] = source[:, row + reach, column + reach].astype(np.float32) * np.float32(1 / 255)
        np.testing.assert_array_equal(got, expected)
    assert len(seen) > 1


def test_alternate_flip_mirrors_every_image_in_every_other_epoch():
    index = np.arange(1000)
    epochs = [gather.mirrored(index, state_at(epoch=epoch, seed=3), "alternate") for epoch in range(4)]
    assert 400 < epochs[0].sum() < 600  # six standard deviations of 1,000 fair coins are 95
    np.testing.assert_array_equal(epochs[1], ~epochs[0])
    np.testing.assert_array_equal(epochs[2], epochs[0])
    np.testing.assert_array_equal(epochs[3], epochs[1])


def test_shifts_are_uniform():
    words = random.words_of(np.arange(9000), state_at(seed=8), 1)
    for word in words:
        counts = np.bincount(gather.uniform(word, 9), minlength=9)
        # Six standard deviations of a count with mean 1,000: 6·√(1,000·8/9) = 179.
        assert counts.size == 9
        assert abs(counts - 1000).max() < 179


# Every option together, at the mean shapes of `gather.cases`; the kernel's arithmetic has no step that may be contracted, so bits are equal.
@pytest.mark.parametrize("case", [case for case in gather.cases() if str(case.op) == "gather"], ids=lambda case: case.label)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_every_option_equals_the_reference_bit_for_bit(device, case, layout):
    expected = np.empty(case.outs[0][0], np.float32)
    gather.gather(*case.ins, expected, **case.attrs)
    (x,) = run_op(gather.OPS[named("gather")], "gather", case.ins, case.outs, device=device, attrs=case.attrs, layout=layout)
    np.testing.assert_array_equal(x, expected)


def test_a_real_augmented_batch_equals_the_reference_bit_for_bit(gpu, rng):
    images, order = data(rng, 2048, (3, 32, 32))
    state, outs = state_at(position=512, epoch=7, seed=11), [((1024, 3, 32, 32), "float32")]
    attrs = {"flip": True, "crop": 4, "reflect": True, "cutout": 8, "shift": (125.3, 123.0, 113.9), "factor": (0.0158, 0.0161, 0.0150)}
    expected = np.empty(outs[0][0], np.float32)
    gather.gather(images, order, state, expected, **attrs)
    for layout in ("NCHW", "NHWC"):
        (x,) = run_op(gather.OPS[named("gather")], "gather", [images, order, state], outs, device=gpu, attrs=attrs, layout=layout)
        np.testing.assert_array_equal(x, expected)


def test_normalised_pixels_and_floats(run, rng):
    images, order = data(rng, 5, (2, 3, 4))
    shift, factor = (100.5, 3.25), (0.125, 1 / 3)
    (x,) = run("gather", [images, order, state_at()], [((5, 2, 3, 4), "float32")], attrs={"shift": shift, "factor": factor})
    by_channel = [np.array(values, np.float32)[:, None, None] for values in (shift, factor)]
    np.testing.assert_array_equal(x, (images[order].astype(np.float32) - by_channel[0]) * by_channel[1])
    floats = rng.standard_normal((5, 2, 3, 4)).astype(np.float32)
    (x,) = run("gather", [floats.reshape(-1), order, state_at()], [((5, 2, 3, 4), "float32")])
    np.testing.assert_array_equal(x, floats[order])


def test_a_ring_is_read_by_position_and_augmented_by_image(run, rng):
    images, order = data(rng, 12, (1, 2, 4))
    ring = np.empty((5, 1, 2, 4), np.uint8)
    for position in range(4, 8):
        ring[position % 5] = images[order[position]]
    outs, attrs = [((4, 1, 2, 4), "float32")], {"flip": True}
    (whole,) = run("gather", [images, order, state_at(position=4, seed=2)], outs, attrs=attrs)
    (streamed,) = run("gather", [ring, order, state_at(position=4, seed=2)], outs, attrs=attrs | {"ring": 5})
    np.testing.assert_array_equal(streamed, whole)


@pytest.mark.parametrize("attrs", [{"flip": True}, {"flip": "alternate"}, {"ring": 5}], ids=str)
def test_labels_of_pixels_are_moved_as_the_pixels_are(run, rng, attrs):
    """The first channel as classes, gathered beside the image: the same pixels, in a ring too."""
    images, order = data(rng, 9, (2, 5, 4))
    where = [order, state_at(position=2)]
    given = np.random.default_rng(3).permutation(images)[:5] if "ring" in attrs else images
    (x,) = run("gather", [given, *where], [((4, 2, 5, 4), "float32")], attrs={"flip": False} | attrs)
    (y,) = run("gather_labels", [given[:, 0], *where], [((4, 5, 4), "int32")], attrs=attrs)
    np.testing.assert_array_equal(y, np.rint(x[:, 0] * 255))


@pytest.mark.sampled
@on_every_arch
@pytest.mark.parametrize("shape", [(3, 4, 4), (3, 3, 3)])
def test_gather_kernels_compile_without_a_stack_frame(rng, arch, shape):
    images, order = data(rng, 2, shape)
    launches = Bound(gather.OPS[named("gather_labels")], "gather_labels", [order, order, state_at()], [((2,), "int32")], device=Host()).launches
    masks, of_pixels = images[:, 0], [((2, *shape[1:]), "int32")]
    for attrs in ({"flip": True}, {"flip": "alternate", "ring": 4}):
        launches += Bound(
            gather.OPS[named("gather_labels")], "gather_labels", [masks, order, state_at()], of_pixels, attrs=attrs, device=Host()
        ).launches
    for layout in ("NCHW", "NHWC"):
        for flip in (False, True):
            options = {"layout": layout, "attrs": {"flip": flip}, "device": Host()}
            launches += Bound(gather.OPS[named("gather")], "gather", [images, order, state_at()], [((2, *shape), "float32")], **options).launches
    for launch in launches:
        assert_lean(launch, arch, registers=32)
    attrs = {"flip": True, "crop": 4, "reflect": True, "cutout": 8, "shift": (1.0,) * 3, "factor": (2.0,) * 3, "ring": 4}
    options = {"layout": "NHWC", "attrs": attrs, "device": Host()}
    (launch,) = Bound(gather.OPS[named("gather")], "gather", [images, order, state_at()], [((2, *shape), "float32")], **options).launches
    # Compute capability 7.5 takes 50 registers, and has 64 for each of its 1,024 threads per multiprocessor; 9.0 takes 26.
    assert_lean(launch, arch, registers=64)
