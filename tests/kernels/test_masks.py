import pytest
import torch
from longreach_kernels import Causal, Full, Mask, Window


def seen(mask: Mask, q: int, num_keys: int) -> list[int]:
    return mask.allowed(torch.tensor([q]), torch.arange(num_keys))[0].nonzero().flatten().tolist()


def test_causal_sees_itself_and_what_came_before():
    assert seen(Causal(), 3, 6) == [0, 1, 2, 3]
    assert seen(Causal(), 0, 6) == [0]
    assert seen(Causal(), -1, 6) == []


def test_full_sees_everything():
    assert seen(Full(), 3, 6) == [0, 1, 2, 3, 4, 5]


def test_a_window_counts_the_query_itself():
    assert seen(Window(1), 3, 6) == [3]
    assert seen(Window(3), 3, 6) == [1, 2, 3]
    assert seen(Window(100), 3, 6) == [0, 1, 2, 3]


def test_sinks_stay_visible_but_never_before_their_time():
    assert seen(Window(2, sinks=2), 5, 8) == [0, 1, 4, 5]
    assert seen(Window(2, sinks=4), 2, 8) == [0, 1, 2]


@pytest.mark.parametrize("size", [0, -4, 2.5])
def test_a_window_without_the_query_is_an_error(size):
    with pytest.raises(ValueError, match="size"):
        Window(size)


def test_negative_sinks_are_an_error():
    with pytest.raises(ValueError, match="sinks"):
        Window(4, sinks=-1)


def test_masks_are_values():
    assert Window(4, sinks=1) == Window(4, 1)
    assert Window(4) != Window(5)
    assert len({Causal(), Causal(), Full(), Window(4), Window(4)}) == 3
    assert repr(Window(4, 1)) == "Window(size=4, sinks=1)"
