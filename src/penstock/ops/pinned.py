"""Host memory that is page-locked (pinned) in place, from which a GPU copies by itself."""

import weakref

import torch


class Pinned:
    """Page-locked (pinned) host memory for asynchronous copies, registered while this object lives.

    Existing memory is registered in place, because torch rounds pinned allocations up to a power of two."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        # Unregister even without a call of `release`, or the next owner of the address could not pin it.
        self.release = weakref.finalize(self, lambda address: torch.cuda.check_error(
            torch.cuda.cudart().cudaHostUnregister(address)), memory.data_ptr())
