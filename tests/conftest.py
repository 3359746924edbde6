"""Which tests run where: gpu needs a CUDA device, interpret needs a process started with TRITON_INTERPRET=1."""

import os
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings

settings.register_profile("aspire", deadline=None, print_blob=True)
settings.load_profile("aspire")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    has_gpu = any("gpu" in item.keywords for item in items) and _cuda_is_available()
    for item in items:
        if "gpu" in item.keywords and (interpreting or not has_gpu):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and compiled kernels"))
        if "interpret" in item.keywords and not interpreting:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 (make test runs it)"))


@pytest.fixture(scope="session", autouse=True)
def rows_alike() -> Iterator[None]:
    """Under the interpreter tl.dot gives an element the same bits wherever it stands, on every CPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    from aspire.testing.interpreter import dot

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()
