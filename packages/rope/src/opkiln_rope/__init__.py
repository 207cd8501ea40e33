"""GPU kernels of opkiln's rotary position embeddings; opkiln finds them through the plugin."""
