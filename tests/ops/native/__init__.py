"""The native kernels against the equations."""
