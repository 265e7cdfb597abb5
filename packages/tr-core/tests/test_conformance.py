import pytest

from tr_core import SingleDevice
from tr_core.testing import check_strategy


@pytest.mark.parametrize("device", ["cpu"])
def test_a_single_device_keeps_the_promises_of_a_strategy(device):
    check_strategy(SingleDevice(device))


def test_an_object_that_lacks_methods_is_named_with_them():
    with pytest.raises(AssertionError, match="object lacks .*clip_grad_norm.* which Strategy has"):
        check_strategy(object())
