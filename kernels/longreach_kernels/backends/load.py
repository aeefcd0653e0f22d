"""The backends by name. Each is imported when it is first asked for: a CPU needs no Triton, and no other GPU Gluon."""

from __future__ import annotations

from longreach_kernels.backends.protocol import AttentionBackend, DifferentiableBackend


def backend_of(name: str) -> AttentionBackend:
    """The backend of a name that `resolve_backend` gives."""
    if name == "reference":
        from longreach_kernels.backends.reference.backend import BACKEND

        return BACKEND
    return differentiable_backend_of(name)


def differentiable_backend_of(name: str) -> DifferentiableBackend:
    """Any backend but ``"reference"``, which is made of differentiable operations and has no backward pass.

    Raises:
        KeyError: there is no such backend.
    """
    if name == "cpu":
        from longreach_kernels.backends.cpu.backend import BACKEND as CPU

        return CPU
    if name == "triton":
        from longreach_kernels.backends.triton.backend import BACKEND as TRITON

        return TRITON
    if name == "hopper":
        from longreach_kernels.backends.hopper.backend import BACKEND as HOPPER

        return HOPPER
    raise KeyError(name)
