"""GPU kernels of opkiln's FFT, MHC and top-k ops; opkiln finds them through the plugin."""
