"""Programmatic dependent launch (ops/gpu.py::linked) in Triton kernels: one may begin while the previous one still runs."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter(linked: tl.constexpr):
    """The beginning of a kernel that reads nothing before the previous one has ended."""
    launch(linked)
    await_previous(linked)


@triton.jit
def follow(linked: tl.constexpr):
    """The same of one whose next kernel may read, before it waits in turn, what kernels before the previous one wrote."""
    await_previous(linked)
    launch(linked)


@triton.jit
def launch(linked: tl.constexpr):
    """Lets the next kernel begin."""
    if linked:
        gdc_launch_dependents()


@triton.jit
def await_previous(linked: tl.constexpr):
    """Waits until the previous kernel has ended: what it wrote can be read."""
    if linked:
        gdc_wait()
