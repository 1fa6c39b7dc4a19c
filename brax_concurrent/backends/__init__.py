"""Compile, allocate and launch, on the CPU and on CUDA."""
