"""The version, for what must not import the package's heavy parts."""

__version__ = "0.1.0"
