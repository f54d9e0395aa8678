import numpy as np
import pytest

from tests.utils.png import decode_png
from trainkit.utils.png import encode_png


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 5, 3), (7, 3, 3)])
def test_an_image_comes_back_as_it_was(shape):
    image = np.random.default_rng(1).integers(0, 256, shape, np.uint8)

    assert np.array_equal(decode_png(encode_png(image)), image)


def test_a_view_of_an_image_comes_back_as_it_looks():
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)

    assert np.array_equal(decode_png(encode_png(image[::-1, ::2, ::-1])), image[::-1, ::2, ::-1])


def test_the_reader_of_these_tests_notices_a_wrong_checksum_and_another_image():
    content = encode_png(np.zeros((2, 2, 3), np.uint8))

    with pytest.raises(AssertionError):
        decode_png(content[:20] + b"\1" + content[21:])
    assert not np.array_equal(decode_png(content), np.ones((2, 2, 3)))


def test_header_and_end_have_the_bytes_of_every_image_of_one_pixel():
    content = encode_png(np.array([[[255, 0, 0]]], np.uint8))

    assert content[:33].hex() == "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    assert content[-12:].hex() == "0000000049454e44ae426082"
