"""Linear-time attention as a latent-variable model: Latte, Latte-Macchiato and their kin."""

__version__ = "0.1.0"
