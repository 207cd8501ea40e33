"""GPU kernels of opkiln's convolutions; opkiln finds them through the plugin."""
