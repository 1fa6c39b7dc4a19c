"""The physics: kernels of one environment, in MuJoCo's stages and with MuJoCo's names."""
