import random

import numpy as np
import torch

from trainkit.data.seeding import seed_globals, splitmix64, undisturbed_globals


def test_the_numbers_are_those_of_the_published_generator():
    assert [splitmix64(1234567, n) for n in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix64(0, 0) == 16294208416658607535
    assert splitmix64(2**64 + 5, 10**12) == splitmix64(5, 10**12) < 2**64


def test_all_bits_of_a_number_matter_and_the_generators_draw_different_numbers():
    def drawn(number):
        of_python = random.getstate()
        of_numpy = np.random.get_state()[1].tolist()
        of_torch = torch.get_rng_state().tolist()
        with undisturbed_globals():
            seed_globals(number)
            integers = (
                int(np.random.randint(2**31)),
                int(torch.randint(2**31, ())),
                random.getrandbits(31),
            )
        assert len({*integers}) == 3
        assert random.getstate() == of_python
        assert np.random.get_state()[1].tolist() == of_numpy
        assert torch.get_rng_state().tolist() == of_torch
        return integers

    first = drawn(1 << 32 | 1)

    # those of earlier versions
    assert drawn(1 << 32 | 1) == first == (1791095845, 2135392491, 495925058)
    assert [a == b for a, b in zip(drawn(1 << 32 | 2), first, strict=True)] == [True, False, False]
    assert [a == b for a, b in zip(drawn(2 << 32 | 1), first, strict=True)] == [False, True, False]
