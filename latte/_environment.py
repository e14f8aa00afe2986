"""Settings that torch reads from the environment when it starts: imported before anything that imports torch."""

import os

# Large tensors in large pages. A fresh output of 32 MB is otherwise 8192 pages of 4 kB, each zeroed by the system when
# it is first touched, which takes longer than computing it. Whoever has set this keeps their setting.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
