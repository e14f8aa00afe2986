"""Commands: each a short file with a ``run`` function over what Python users can call too."""
