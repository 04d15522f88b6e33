"""The door to the GPU: streams, graphs, kernels, prefetch, fused and folded networks.

Nothing else in the package names torch.cuda, CUDA graphs, compilation or Triton (`tools/check_architecture.py`). This
page imports only what asks about devices: the rest builds on training, which asks for that.
"""

from efcil.accel.device import copied_in_place, device_count, free_memory, is_available, run_stream, synchronize

__all__ = ["copied_in_place", "device_count", "free_memory", "is_available", "run_stream", "synchronize"]
