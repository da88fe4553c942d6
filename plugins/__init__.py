"""What plugs into a device: kernels with a PyTorch reference each, and the models that run on them."""
