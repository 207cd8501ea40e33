"""What kernels of several families and core's own torch backend share on a device."""
