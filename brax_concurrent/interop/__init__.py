"""The crossings to other libraries: JAX, Gymnasium, Brax, PyTorch."""
