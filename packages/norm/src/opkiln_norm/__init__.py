"""GPU kernels of opkiln's normalization ops; opkiln finds them through the plugin."""
