"""Where kernels are tested, and with which numbers."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the portable kernels run: "cpu" is the interpreter, which a machine with a GPU does not use."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is tested where there is no GPU")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
