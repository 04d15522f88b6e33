"""The door to the GPU: streams, graphs, kernels, prefetch, fused and folded networks."""
