"""GPU kernels of opkiln's poolings; opkiln finds them through the plugin."""
