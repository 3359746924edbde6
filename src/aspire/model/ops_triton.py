"""ModelOps for CUDA: fused kernels between the GEMMs. The only file of the model package that needs Triton."""

import torch.nn.functional as F

from aspire.model.layers import Linear, ModelOps
from aspire.ops.gate.triton import gate
from aspire.ops.rms_norm.triton import add_rms_norm, rms_norm
from aspire.ops.rotate.triton import rotate


def triton_ops(linear: Linear = F.linear) -> ModelOps:
    """Kernels for every operation but the GEMM, which is `linear`: the library's, or a batch-invariant one."""
    return ModelOps(linear=linear, rms_norm=rms_norm, add_rms_norm=add_rms_norm, rotate=rotate, gate=gate)
