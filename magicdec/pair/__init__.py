"""What builder and runtime share: a pair's configuration, its manifests, and what it needs of memory.

Neither imports the other; both build on `plugins` (kernels, and the model that they execute) besides.
"""
