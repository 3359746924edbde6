"""A matrix product for Triton's interpreter that, as a GPU's matrix unit does, treats all rows and columns alike."""

import numpy
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

DEPTH = 16  # products added before the running sum, as one matrix instruction does for 16-bit operands


def multiply_alike(a: numpy.ndarray, b: numpy.ndarray, start: numpy.ndarray) -> numpy.ndarray:
    """start + a @ b, a [M, K], b [K, N]: an element's bits depend on its row of a, its column of b and its start only.

    NumPy's own product, which interprets tl.dot otherwise, has other bits, on some CPUs, by the matrices' sizes and an
    element's place in them.
    """
    out: numpy.ndarray = start.copy()
    for k in range(0, a.shape[1], DEPTH):
        left = numpy.ascontiguousarray(a[:, k:k + DEPTH], dtype=start.dtype)
        right = numpy.ascontiguousarray(b[k:k + DEPTH], dtype=start.dtype)
        out += numpy.einsum("mk,kn->mn", left, right, optimize=False)
    return out


def dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
    """In place of InterpreterBuilder.create_dot, for operands that NumPy knows."""
    return TensorHandle(multiply_alike(a.data, b.data, d.data), d.dtype.scalar)
